/* What the files that catch calls share: a call on its way, and the way it takes. */
#ifndef GEMMTUNE_CALLS_H
#define GEMMTUNE_CALLS_H

#include <string.h>

#include "gemmtune.h"

#define LT_FUNCTION(type, at, name) ((type *)loaded(&at, LT_LIBRARY, LT_NAME(name)))
#define BLAS_FUNCTION(type, at, name) ((type *)loaded(&at, BLAS_LIBRARY, BLAS_NAME(name)))

extern _Thread_local int inside; /* a call that the library makes on its own is not the job's */

/* Whether this call is to be looked at: it is the job's, and somebody wants to know. */
int watched(void);

/* A call of the job's: `go` makes it, with an algorithm of ours or, where that is NULL, its own;
 * `plan` has its descriptors, NULL where they cannot be made. */
typedef struct Call Call;
struct Call {
    int (*go)(const Call *call, Cell *cell, const uint64_t *algo);
    const Plan *(*plan)(const Call *call, Cell *cell);
    const uint64_t *algo; /* the one that the job gave, NULL for none */
    void *handle, *stream;
};

/* Launches a call as its GEMM's choice says, else as the job made it, and counts it. */
int dispatch(const Key *key, const Call *call);

/* The largest power of two, up to what matters, that all four addresses are multiples of. */
static inline int alignment(const void *a, const void *b, const void *c, const void *d)
{
    uintptr_t bits = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | MOST_ALIGN;
    return (int)(bits & -bits);
}

/* Whether a scalar of this type is other than zero; -1 for types that are not known. */
static inline int nonzero(const void *scalar, int type)
{
    uint64_t bits = 0;
    size_t size = type == TYPE_32F ? 4 : type == TYPE_64F ? 8 : type == TYPE_16F ? 2 : 0;
    if (!size || !scalar) return -1;
    memcpy(&bits, scalar, size);
    return (bits << (64 - 8 * size + 1)) != 0; /* without the sign: -0 is 0 */
}

/* What is kept beside the calls: the workspaces that the job gave its handles (blas.c), or what it
 * made its descriptors of (kept.c). */
void kept_lock(void);
void kept_unlock(void);
void kept_fork_child(void);

#ifdef GEMMTUNE_HIP
int kept_layout(void *of, int attribute, void *to, size_t size, size_t *written);
int kept_desc(void *of, int attribute, void *to, size_t size, size_t *written);
#endif

#endif
