/* What the job made its descriptors of. hipBLASLt tells of a layout its batch alone, and of a description
 * neither compute nor scale type (rocblaslt_auxiliary.cpp), so they are noted as they are made, under
 * their addresses, until they are destroyed. Not yet run on an AMD GPU. */
#ifdef GEMMTUNE_HIP
#include <pthread.h>
#include <stdlib.h>

#include "calls.h"

typedef struct Kept Kept;
struct Kept {
    void *of;
    int32_t values[2]; /* a description's compute and scale type; a layout's type and order */
    uint64_t rows, columns;
    int64_t ld, stride;
    int32_t batch;
    Kept *next;
};

enum { BUCKETS = 1024 };
static Kept *buckets[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(void *) make_layout, set_layout, drop_layout, make_desc, drop_desc, get_desc;

void kept_lock(void) { pthread_mutex_lock(&lock); }
void kept_unlock(void) { pthread_mutex_unlock(&lock); }
void kept_fork_child(void) { pthread_mutex_init(&lock, NULL); }

/* The place that points to it, or to the end of its bucket; the lock is held. */
static Kept **place(const void *of)
{
    Kept **at = &buckets[((uintptr_t)of >> 4) * 0x9e3779b97f4a7c15 >> 54];
    while (*at && (*at)->of != of) at = &(*at)->next;
    return at;
}

/* Without memory it is not known, and its calls go through unread. */
static void keep(Kept made)
{
    kept_lock();
    Kept **at = place(made.of), *own = *at ? *at : calloc(1, sizeof *own);
    if (own) {
        made.next = own->next;
        *own = made;
        *at = own;
    }
    kept_unlock();
}

static void forget(const void *of)
{
    kept_lock();
    Kept **at = place(of), *own = *at;
    if (own) *at = own->next;
    kept_unlock();
    free(own);
}

static void *field(Kept *kept, int attribute, size_t *size)
{
    *size = 8;
    switch (attribute) {
    case LAYOUT_ROWS: return &kept->rows;
    case LAYOUT_COLUMNS: return &kept->columns;
    case LAYOUT_LD: return &kept->ld;
    case LAYOUT_STRIDE: return &kept->stride;
    }
    *size = 4;
    switch (attribute) {
    case LAYOUT_TYPE: case DESC_COMPUTE: return &kept->values[0];
    case LAYOUT_ORDER: case DESC_SCALE_TYPE: return &kept->values[1];
    case LAYOUT_BATCH: return &kept->batch;
    }
    return NULL;
}

static int get(void *of, int attribute, void *to, size_t size)
{
    size_t own;
    kept_lock();
    Kept *kept = *place(of);
    void *from = kept ? field(kept, attribute, &own) : NULL;
    int known = from && own == size;
    if (known) memcpy(to, from, size);
    kept_unlock();
    return known ? STATUS_SUCCESS : STATUS_NOT_INITIALIZED;
}

int kept_layout(void *of, int attribute, void *to, size_t size, size_t *written)
{
    *written = size;
    return get(of, attribute, to, size);
}

/* By way of 8 bytes: builds of 2024 write so many of a pointer mode, whatever room there is. */
int kept_desc(void *of, int attribute, void *to, size_t size, size_t *written)
{
    LtGet *real = LT_FUNCTION(LtGet, get_desc, MatmulDescGetAttribute);
    uint64_t room = 0;
    if (attribute < 0) return get(of, attribute, to, size);
    int status = real ? real(of, attribute, &room, sizeof room, written) : STATUS_NOT_INITIALIZED;
    if (!status) memcpy(to, &room, size);
    return status;
}

EXPORT int LT(MatrixLayoutCreate)(void **made, int type, uint64_t rows, uint64_t columns, int64_t ld)
{
    LtLayoutCreate *real = LT_FUNCTION(LtLayoutCreate, make_layout, MatrixLayoutCreate);
    int status = real ? real(made, type, rows, columns, ld) : STATUS_NOT_INITIALIZED;
    if (!status)
        keep((Kept){.of = *made, .values = {type, ORDER_COLUMN}, .rows = rows, .columns = columns,
                    .ld = ld, .batch = 1});
    return status;
}

EXPORT int LT(MatrixLayoutSetAttribute)(void *of, int attribute, const void *from, size_t size)
{
    LtSet *real = LT_FUNCTION(LtSet, set_layout, MatrixLayoutSetAttribute);
    int status = real ? real(of, attribute, from, size) : STATUS_NOT_INITIALIZED;
    size_t own;
    if (status) return status;
    kept_lock();
    Kept *kept = *place(of);
    void *to = kept ? field(kept, attribute, &own) : NULL;
    if (to && own <= size) memcpy(to, from, own);
    kept_unlock();
    return status;
}

EXPORT int LT(MatrixLayoutDestroy)(void *of)
{
    LtDestroy *real = LT_FUNCTION(LtDestroy, drop_layout, MatrixLayoutDestroy);
    forget(of); /* before another one can have its address */
    return real ? real(of) : STATUS_NOT_INITIALIZED;
}

EXPORT int LT(MatmulDescCreate)(void **made, int compute, int scale_type)
{
    LtDescCreate *real = LT_FUNCTION(LtDescCreate, make_desc, MatmulDescCreate);
    int status = real ? real(made, compute, scale_type) : STATUS_NOT_INITIALIZED;
    if (!status) keep((Kept){.of = *made, .values = {compute, scale_type}});
    return status;
}

EXPORT int LT(MatmulDescDestroy)(void *of)
{
    LtDestroy *real = LT_FUNCTION(LtDestroy, drop_desc, MatmulDescDestroy);
    forget(of);
    return real ? real(of) : STATUS_NOT_INITIALIZED;
}
#endif
