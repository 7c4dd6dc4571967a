/* What is known of each GEMM: how often it ran with which algorithm, and what it is to run with.
 *
 * Read without a lock, from any thread; a lock is taken where something is new. Cells and algorithms
 * are never freed, and a grown index leaves the old one to its readers. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "gemmtune.h"

enum { FIRST_SLOTS = 256, MOST_CELLS = 1 << 16, MOST_ALGOS = 1 << 12 };

typedef struct Index Index;
struct Index {
    size_t mask;
    Index *older;
    _Atomic(Cell *) slots[];
};

static _Atomic(Index *) index_;
static size_t cells;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void table_lock(void) { pthread_mutex_lock(&lock); }
void table_unlock(void) { pthread_mutex_unlock(&lock); }

static uint64_t hash_of(const Key *key)
{
    uint64_t words[sizeof(Key) / 8], h = 0x9e3779b97f4a7c15u;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        h = (h ^ words[i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return h;
}

static Cell *find(Index *index, const Key *key, uint64_t hash)
{
    if (!index) return NULL;
    for (size_t i = hash & index->mask;; i = (i + 1) & index->mask) {
        Cell *cell = atomic_load_explicit(&index->slots[i], memory_order_acquire);
        if (!cell) return NULL;
        if (cell->hash == hash && !memcmp(&cell->key, key, sizeof *key)) return cell;
    }
}

static void insert(Index *index, Cell *cell)
{
    size_t i = cell->hash & index->mask;
    while (atomic_load_explicit(&index->slots[i], memory_order_relaxed)) i = (i + 1) & index->mask;
    atomic_store_explicit(&index->slots[i], cell, memory_order_release);
}

/* An index with room for one more, which is at most half full so that searches end. */
static Index *roomy(Index *old)
{
    if (old && (cells + 1) * 2 <= old->mask + 1) return old;
    size_t slots = old ? (old->mask + 1) * 2 : FIRST_SLOTS;
    Index *made = calloc(1, sizeof *made + slots * sizeof *made->slots);
    if (!made) return NULL;
    made->mask = slots - 1;
    made->older = old;
    for (size_t i = 0; old && i <= old->mask; i++) {
        Cell *cell = atomic_load_explicit(&old->slots[i], memory_order_relaxed);
        if (cell) insert(made, cell);
    }
    atomic_store_explicit(&index_, made, memory_order_release);
    return made;
}

static Cell *make(const Key *key, uint64_t hash)
{
    Index *index = atomic_load_explicit(&index_, memory_order_acquire);
    Cell *cell = find(index, key, hash);
    if (cell) return cell;
    if (cells >= MOST_CELLS || !(index = roomy(index))) return NULL;
    if (!(cell = calloc(1, sizeof *cell))) return NULL;
    cell->key = *key;
    cell->hash = hash;
    insert(index, cell);
    cells++;
    return cell;
}

Cell *table_cell(const Key *key)
{
    uint64_t hash = hash_of(key);
    Cell *cell = find(atomic_load_explicit(&index_, memory_order_acquire), key, hash);
    if (cell) return cell;
    table_lock();
    cell = make(key, hash);
    table_unlock();
    return cell;
}

static const uint64_t none[ALGO_WORDS];

static Algo *find_algo(Cell *cell, const uint64_t *words, int applied, size_t *count)
{
    Algo *algo = atomic_load_explicit(&cell->algos, memory_order_acquire);
    for (*count = 0; algo; algo = algo->next, ++*count)
        if (algo->applied == applied && !memcmp(algo->words, words, sizeof algo->words)) break;
    return algo;
}

static Algo *make_algo(Cell *cell, const uint64_t *words, int applied)
{
    size_t count;
    Algo *algo = find_algo(cell, words, applied, &count);
    if (algo || count >= MOST_ALGOS || !(algo = calloc(1, sizeof *algo))) return algo;
    memcpy(algo->words, words, sizeof algo->words);
    algo->applied = applied;
    atomic_store(&algo->state, UNTRIED);
    algo->next = atomic_load_explicit(&cell->algos, memory_order_relaxed);
    atomic_store_explicit(&cell->algos, algo, memory_order_release);
    return algo;
}

Algo *table_algo(Cell *cell, const uint64_t *words)
{
    size_t count;
    if (!words) words = none;
    Algo *algo = find_algo(cell, words, 0, &count);
    if (algo) return algo;
    table_lock();
    algo = make_algo(cell, words, 0);
    table_unlock();
    return algo;
}

/* Once for every cell; the lock is held. */
#define FOR_CELLS(cell)                                                    \
    for (Index *index = atomic_load(&index_); index; index = NULL)         \
        for (size_t slot = 0; slot <= index->mask; slot++)                 \
            for (Cell *cell = atomic_load(&index->slots[slot]); cell; cell = NULL)

/* The rows replace all earlier ones. Returns 0, or -1 where there was no memory for all of them. */
int table_choose(const Row *rows, size_t count)
{
    int result = 0;
    table_lock();
    for (size_t i = 0; i < count; i++) { /* made first: then a GEMM changes over at once */
        Cell *cell = make(&rows[i].key, hash_of(&rows[i].key));
        uint64_t words[ALGO_WORDS] = {0};
        memcpy(words, rows[i].settings, sizeof rows[i].settings);
        Algo *algo = cell ? make_algo(cell, words, 1) : NULL;
        if (!algo) {
            result = -1;
            continue;
        }
        if (atomic_load(&algo->state) != FINE) atomic_store(&algo->state, UNTRIED);
        cell->next = algo;
    }
    FOR_CELLS(cell) {
        atomic_store_explicit(&cell->chosen, cell->next, memory_order_release);
        cell->next = NULL;
    }
    table_unlock();
    return result;
}

/* Writes what was launched since the last time, up to `room` rows; returns how many. */
size_t table_drain(Launch *to, size_t room)
{
    size_t count = 0;
    table_lock();
    FOR_CELLS(cell)
        for (Algo *algo = atomic_load(&cell->algos); algo && count < room; algo = algo->next) {
            Launch row = {.key = cell->key, .applied = (uint64_t)algo->applied,
                          .id = (uintptr_t)algo};
            row.calls = atomic_exchange(&algo->calls, 0);
            row.timed = atomic_exchange(&algo->timed, 0);
            row.time_ns = atomic_exchange(&algo->time_ns, 0);
            memcpy(row.algo, algo->words, sizeof row.algo);
            if (row.calls || row.timed) to[count++] = row;
        }
    table_unlock();
    return count;
}

void table_forget_counts(void)
{
    FOR_CELLS(cell)
        for (Algo *algo = atomic_load(&cell->algos); algo; algo = algo->next) {
            atomic_store(&algo->calls, 0);
            atomic_store(&algo->timed, 0);
            atomic_store(&algo->time_ns, 0);
        }
}

void table_fork_child(void)
{
    pthread_mutex_init(&lock, NULL);
    table_forget_counts();
}
