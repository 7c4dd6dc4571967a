/* The job's GEMM calls on their way to the library, and what Python asks for.
 *
 * Each call's Key is made afresh from its descriptors (lt.c, blas.c): their addresses recur with other
 * contents. Whatever goes wrong in here, the call goes through as the job made it, and is counted by reason. */
#include <pthread.h>
#include <stdlib.h>

#include "calls.h"

static atomic_uint mode_;
static _Atomic uint64_t faults[REASONS];
_Thread_local int inside;
static _Thread_local Trail trail;
#ifdef GEMMTUNE_HIP
static _Atomic(void *) make_preference, set_preference, drop_preference, heuristic;
#else
static _Atomic(void *) algo_init, algo_set, algo_check;
#endif

void fault(Reason reason) { atomic_fetch_add_explicit(&faults[reason], 1, memory_order_relaxed); }

int watched(void) { return !inside && atomic_load_explicit(&mode_, memory_order_relaxed); }

/* Launches `algo`, where it is not NULL, else what the job asked for; counts it as `count`. */
static int launch(const Call *call, Cell *cell, const uint64_t *words, Algo *count)
{
    int timed = atomic_load_explicit(&mode_, memory_order_relaxed) & MODE_TIME;
    /* Other calls are not asked: it matters where arms take turns, and where a choice is launched. */
    int captures = count && (timed || words) ? timing_captures(call->stream) : 0;
    Timing *timing = timed && count && !captures ? timing_begin(call->stream) : NULL;
    int status = call->go(call, cell, words);
    if (status != STATUS_SUCCESS) {
        timing_drop(timing);
        return status;
    }
    timing_end(timing, count, call->stream);
    if (captures > 0) fault(GRAPHED);
    if (count) {
        atomic_fetch_add_explicit(&count->calls, 1, memory_order_relaxed);
        trail.launched[trail.calls++ % TRAIL] = (uintptr_t)count;
    }
    return status;
}

#ifdef GEMMTUNE_HIP
/* Looks for a choice in the library's list, as no function of its C API checks an algorithm: among
 * the first ones, then in all. FINE, and then it is made; or REFUSED. */
static Reason look_up(const Algo *choice, const Call *call, const Plan *p, uint64_t ws_bytes,
                      uint64_t *made)
{
    LtPreferenceCreate *create = LT_FUNCTION(LtPreferenceCreate, make_preference, MatmulPreferenceCreate);
    LtSet *set = LT_FUNCTION(LtSet, set_preference, MatmulPreferenceSetAttribute);
    LtDestroy *drop = LT_FUNCTION(LtDestroy, drop_preference, MatmulPreferenceDestroy);
    LtHeuristic *list = LT_FUNCTION(LtHeuristic, heuristic, MatmulAlgoGetHeuristic);
    enum { FIRST = 64, ALL = 10000 };
    void *preference = NULL;
    LtResult *results = calloc(ALL, sizeof *results);
    Reason reason = REFUSED;
    if (results && create && set && drop && list && !create(&preference)) {
        int count = 0, ready = !set(preference, PREFERENCE_WORKSPACE, &ws_bytes, sizeof ws_bytes);
        for (int wanted = FIRST; ready && reason; wanted = ALL) {
            if (list(call->handle, p->desc, p->a, p->b, p->c, p->d, preference, wanted, results, &count))
                count = 0;
            for (int i = 0; i < count && reason; i++)
                if (!results[i].state && results[i].algo[0] == choice->words[0]) {
                    memcpy(made, results[i].algo, sizeof choice->made);
                    reason = FINE;
                }
            if (wanted == ALL || count < FIRST) break;
        }
        drop(preference);
    }
    free(results);
    return reason;
}

static Reason make(const Algo *choice, const Call *call, Cell *cell, uint64_t *made)
{
    const Plan *p = call->plan(call, cell);
    if (!p) return REFUSED;
    if (look_up(choice, call, p, cell->key.ws_bytes, made) == FINE) return FINE;
    return look_up(choice, call, p, UINT64_MAX, made) == FINE ? WORKSPACE : REFUSED;
}
#else
/* Makes a choice into the library's structure and has it checked; FINE, or why not. */
static Reason make(const Algo *choice, const Call *call, Cell *cell, uint64_t *made)
{
    LtAlgoInit *init = LT_FUNCTION(LtAlgoInit, algo_init, MatmulAlgoInit);
    LtAlgoSet *set = LT_FUNCTION(LtAlgoSet, algo_set, MatmulAlgoConfigSetAttribute);
    LtAlgoCheck *check = LT_FUNCTION(LtAlgoCheck, algo_check, MatmulAlgoCheck);
    const Key *g = &cell->key;
    const Plan *p = call->plan(call, cell);
    uint32_t settings[SETTINGS];
    LtResult result = {0};
    memcpy(settings, choice->words, sizeof settings);
    if (!init || !set || !check || !p) return REFUSED;
    if (init(call->handle, g->comp, g->scale, g->type_a, g->type_b, g->type_d, g->type_d,
             (int)settings[SETTING_ID], made))
        return REFUSED;
    for (int i = 0; i < SETTINGS; i++) {
        uint16_t small = (uint16_t)settings[i];
        int is_small = i >= FIRST_SHORT_SETTING;
        if (i != SETTING_ID && set(made, i, is_small ? (void *)&small : &settings[i],
                                   is_small ? sizeof small : sizeof settings[i]))
            return REFUSED;
    }
    if (check(call->handle, p->desc, p->a, p->b, p->c, p->d, made, &result) || result.state)
        return REFUSED;
    return result.workspace > g->ws_bytes ? WORKSPACE : FINE;
}

#endif

/* Whether a choice can be launched; it is made at its first call. */
static Reason ready(Algo *choice, const Call *call, Cell *cell)
{
    int state = atomic_load_explicit(&choice->state, memory_order_acquire);
    if (state != UNTRIED) return (Reason)state;
    table_lock();
    state = atomic_load_explicit(&choice->state, memory_order_relaxed);
    if (state == UNTRIED) {
        uint64_t made[ALGO_WORDS] = {0};
        inside++;
        state = (int)make(choice, call, cell, made);
        inside--;
        /* Once only: after a refusal it is tried again, while others may still be reading it. */
        if (state == FINE && !choice->is_made) memcpy(choice->made, made, sizeof made);
        choice->is_made |= state == FINE;
        atomic_store_explicit(&choice->state, state, memory_order_release);
    }
    table_unlock();
    return (Reason)state;
}

int dispatch(const Key *key, const Call *call)
{
    Cell *cell = table_cell(key);
    if (!cell) {
        fault(FULL);
        return call->go(call, NULL, NULL);
    }
    Algo *chosen = atomic_load_explicit(&cell->chosen, memory_order_acquire);
    if (chosen) {
        Reason reason = ready(chosen, call, cell);
        if (reason == FINE) {
            int status = launch(call, cell, chosen->made, chosen);
            if (status == STATUS_SUCCESS) return status;
            atomic_store(&chosen->state, reason = REFUSED);
        }
        fault(reason);
    }
    Algo *own = table_algo(cell, call->algo);
    if (!own) fault(FULL);
    return launch(call, cell, NULL, own);
}

/* ------------------------------------------------------------------------------ what Python asks */

EXPORT void gemmtune_mode(unsigned mode) { atomic_store(&mode_, mode); }

EXPORT int gemmtune_choose(const Row *rows, size_t count) { return table_choose(rows, count); }

EXPORT size_t gemmtune_drain(Launch *to, size_t room)
{
    timing_collect();
    return table_drain(to, room);
}

/* The calling thread's own, for as long as it lives. */
EXPORT const Trail *gemmtune_trail(void) { return &trail; }

/* Faults since the start by reason; returns how many reasons there are. */
EXPORT size_t gemmtune_faults(uint64_t *to, size_t room)
{
    for (size_t i = 0; i < room && i < REASONS; i++) to[i] = atomic_load(&faults[i]);
    return REASONS;
}

static void before_fork(void)
{
    kept_lock();
    timing_lock();
    table_lock();
}

static void in_parent(void)
{
    table_unlock();
    timing_unlock();
    kept_unlock();
}

/* What the parent counted is the parent's to tell. */
static void in_child(void)
{
    table_fork_child();
    timing_fork_child();
    kept_fork_child();
    for (int i = 0; i < REASONS; i++) atomic_store(&faults[i], 0);
}

__attribute__((constructor)) static void start(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}
