/* Times calls with GPU events. Nothing waits: an event that has not happened yet is looked at again
 * the next time. Under stream capture nothing is done, not even an event made. */
#include <pthread.h>
#include <stdlib.h>

#include "gemmtune.h"

enum { MOST_WAITING = 1 << 14 };

struct Timing {
    void *start, *end, *context;
    Algo *algo;
    Timing *next;
};

static Timing *waiting, *pool; /* not completed when last seen; to be used again */
static size_t waiting_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void timing_lock(void) { pthread_mutex_lock(&lock); }
void timing_unlock(void) { pthread_mutex_unlock(&lock); }

static _Atomic(void *) get_context, is_capturing, exchange_mode, create, record, query, elapsed;

#define DRIVER(type, at, name) ((type *)loaded(&at, DRIVER_LIBRARY, name))

static int ready(void)
{
    return DRIVER(DriverGetContext, get_context, DRIVER_GET_CONTEXT) &&
           DRIVER(DriverIsCapturing, is_capturing, DRIVER_IS_CAPTURING) &&
           DRIVER(DriverExchangeCaptureMode, exchange_mode, DRIVER_EXCHANGE_CAPTURE_MODE) &&
           DRIVER(DriverEventCreate, create, DRIVER_EVENT_CREATE) &&
           DRIVER(DriverEventRecord, record, DRIVER_EVENT_RECORD) &&
           DRIVER(DriverEventQuery, query, DRIVER_EVENT_QUERY) &&
           DRIVER(DriverEventElapsed, elapsed, DRIVER_EVENT_ELAPSED);
}

#define CALL(type, at) ((type *)atomic_load_explicit(&at, memory_order_acquire))

/* Lets this thread touch events while another one captures in the global mode; call again with the
 * result to go back. */
static int relax(int mode)
{
    CALL(DriverExchangeCaptureMode, exchange_mode)(&mode);
    return mode;
}

static Timing *pooled(void *context)
{
    timing_lock();
    Timing **at = &pool;
    while (*at && (*at)->context != context) at = &(*at)->next;
    Timing *found = *at;
    if (found) *at = found->next;
    timing_unlock();
    return found;
}

static void give_back(Timing *used)
{
    timing_lock();
    used->next = pool;
    pool = used;
    timing_unlock();
}

static Timing *make(void *context)
{
    Timing *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    DriverEventCreate *new = CALL(DriverEventCreate, create);
    made->context = context;
    if (new(&made->start, 0) || new(&made->end, 0)) {
        free(made);
        return NULL;
    }
    return made;
}

int timing_captures(void *stream)
{
    int status = CAPTURE_NONE;
    DriverIsCapturing *asked = DRIVER(DriverIsCapturing, is_capturing, DRIVER_IS_CAPTURING);
    /* It refuses the default stream while another one that waits for it is captured. */
    return asked && !asked(stream, &status) ? status != CAPTURE_NONE : -1;
}

Timing *timing_begin(void *stream)
{
    void *context = NULL;
    if (!ready()) return NULL;
    timing_lock();
    int many = waiting_count >= MOST_WAITING;
    timing_unlock();
    if (!many && !CALL(DriverGetContext, get_context)(&context) && DEVICES_AS_CONTEXTS)
        context = (void *)((uintptr_t)context + 1);
    if (many || !context) {
        fault(NOT_TIMED);
        return NULL;
    }
    int mode = relax(CAPTURE_MODE_RELAXED);
    Timing *timing = pooled(context);
    if (!timing) timing = make(context);
    if (timing && CALL(DriverEventRecord, record)(timing->start, stream)) {
        give_back(timing);
        timing = NULL;
    }
    relax(mode);
    if (!timing) fault(NOT_TIMED);
    return timing;
}

void timing_drop(Timing *timing)
{
    if (timing) give_back(timing);
}

void timing_end(Timing *timing, Algo *algo, void *stream)
{
    if (!timing) return;
    int mode = relax(CAPTURE_MODE_RELAXED);
    int status = CALL(DriverEventRecord, record)(timing->end, stream);
    relax(mode);
    if (status) {
        fault(NOT_TIMED);
        give_back(timing);
        return;
    }
    timing->algo = algo;
    timing_lock();
    timing->next = waiting;
    waiting = timing;
    waiting_count++;
    timing_unlock();
}

void timing_collect(void)
{
    timing_lock();
    Timing **at = &waiting;
    int mode = waiting ? relax(CAPTURE_MODE_RELAXED) : 0, relaxed = waiting != NULL;
    while (*at) {
        Timing *one = *at;
        float ms;
        int status = CALL(DriverEventQuery, query)(one->end);
        if (status == DRIVER_NOT_READY) {
            at = &one->next;
            continue;
        }
        if (!status) status = CALL(DriverEventElapsed, elapsed)(&ms, one->start, one->end);
        if (status) {
            fault(NOT_TIMED);
        } else {
            atomic_fetch_add(&one->algo->timed, 1);
            atomic_fetch_add(&one->algo->time_ns, (uint64_t)((double)ms * 1e6));
        }
        *at = one->next;
        waiting_count--;
        one->next = pool;
        pool = one;
    }
    if (relaxed) relax(mode);
    timing_unlock();
}

/* The parent's events mean nothing in a child: they are left, not destroyed. */
void timing_fork_child(void)
{
    pthread_mutex_init(&lock, NULL);
    waiting = pool = NULL;
    waiting_count = 0;
}
