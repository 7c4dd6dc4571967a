/* The interposer's parts: table.c (what is known of each GEMM), timing.c (GPU events), loaded.c (the
 * real functions), interposer.c (the job's calls). client.py mirrors Key, Row and Launch. */
#ifndef GEMMTUNE_H
#define GEMMTUNE_H

#include <stdatomic.h>
#include <stdint.h>

#include "vendor.h"

#define EXPORT __attribute__((visibility("default")))

enum { MODE_ON = 1, MODE_TIME = 2 }; /* off: calls go through unseen */

/* One GEMM as the library is called, in the library's own numbers. No padding: it is compared and
 * hashed as memory. bias_type is -1 without a bias, api is one of the numbers below. */
typedef struct {
    uint64_t m, n, k;
    int64_t lda, ldb, ldd, stride_a, stride_b, stride_d;
    uint64_t ws_bytes;
    int32_t trans_a, trans_b, type_a, type_b, type_d, bias_type, epi, comp, scale;
    int32_t beta, batch, fast_accum, scale_mode, align, api, unused;
} Key;
_Static_assert(sizeof(Key) == 10 * 8 + 16 * 4, "no padding");

enum { API_LT, API_GEMM, API_BATCHED, API_SINGLE, API_SINGLE_BATCHED };

/* A choice: launch this GEMM with the algorithm of these settings. */
typedef struct {
    Key key;
    uint32_t settings[SETTINGS], unused;
} Row;

/* What was launched. `applied`: a choice, and the first words of `algo` are its settings; else `algo`
 * is what the job itself gave, zeros where it gave none. `time_ns` is the sum over the `timed`; `id` is one for each Key
 * and algorithm, for as long as the process lives. */
typedef struct {
    Key key;
    uint64_t algo[ALGO_WORDS];
    uint64_t id, applied, calls, timed, time_ns;
} Launch;

/* What the calling thread has launched, the latest last: `launched` is a ring of Launch's ids. */
enum { TRAIL = 64 };
typedef struct {
    uint64_t calls, launched[TRAIL];
} Trail;

/* Why a call was not launched, timed or even counted as it should have been. */
typedef enum {
    FINE,
    NOT_READ,    /* the library would not tell an attribute */
    NOT_SPELLED, /* a call that no Key describes: row order, device scalars, C unlike D, … */
    FULL,        /* more GEMMs than the table holds, or no memory */
    WORKSPACE,   /* the choice needs more workspace than the call has */
    REFUSED,     /* the library refused the choice */
    NOT_TIMED,   /* no event could be had */
    GRAPHED,     /* no fault: it went into a graph, where it stays as it is, and untimed */
    REASONS
} Reason;
enum { UNTRIED = -1 };
void fault(Reason reason);

/* One algorithm of one GEMM: `words` as in Launch. A choice is made into the library's structure at
 * its first call, with that call's handle: only then is the job's device certain to be in use. */
typedef struct Algo Algo;
struct Algo {
    uint64_t words[ALGO_WORDS], made[ALGO_WORDS];
    int applied, is_made;
    atomic_int state; /* FINE: made; UNTRIED; or the reason why it cannot be launched */
    _Atomic uint64_t calls, timed, time_ns;
    Algo *next;
};

/* The descriptors of a call in the newer API's terms. */
typedef struct {
    void *desc, *a, *b, *c, *d;
} Plan;

typedef struct {
    Key key;
    uint64_t hash;
    _Atomic(Algo *) algos, chosen;
    _Atomic(Plan *) plan; /* for calls of the older API: made once, never changed */
    Algo *next; /* while choices are exchanged */
} Cell;

/* Found or made; NULL where it cannot be. `words` may be NULL: the job gave no algorithm. */
Cell *table_cell(const Key *key);
Algo *table_algo(Cell *cell, const uint64_t *words);
int table_choose(const Row *rows, size_t count);
size_t table_drain(Launch *to, size_t room);
void table_forget_counts(void);
void table_lock(void);
void table_unlock(void);
void table_fork_child(void);

/* The time of one call on its stream: begun before it, NULL where it is not to be timed; ended after
 * it, or dropped. What has completed is added to its algorithm by `timing_collect`. */
typedef struct Timing Timing;
int timing_captures(void *stream); /* into a graph; -1 where that cannot be told */
Timing *timing_begin(void *stream);
void timing_end(Timing *timing, Algo *algo, void *stream);
void timing_drop(Timing *timing);
void timing_collect(void);
void timing_lock(void);
void timing_unlock(void);
void timing_fork_child(void);

/* A function of a loaded library, whatever scope it was loaded into; NULL where there is none yet.
 * `at` keeps it. Never one of our own. */
void *loaded(_Atomic(void *) *at, const char *library, const char *name);

#endif
