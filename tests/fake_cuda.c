/* A stand-in for the part of libcuda that times calls, with HIP for that of libamdhip64: events on the
 * host's clock, that complete when the test says. Written from cuda.h and hip_runtime_api.h. While a stream captures, touching events is refused as the
 * driver does it, and counted: nothing of gemmtune's may try. */
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#ifdef HIP
#define cuStreamIsCapturing hipStreamIsCapturing
#define cuThreadExchangeStreamCaptureMode hipThreadExchangeStreamCaptureMode
#define cuEventCreate hipEventCreateWithFlags
#define cuEventRecord hipEventRecord
#define cuEventQuery hipEventQuery
#define cuEventElapsedTime hipEventElapsedTime
#endif

enum { OK = 0, INVALID = 1, NOT_READY = 600, UNSUPPORTED = 900, RELAXED = 2 };

typedef struct { double ms; int recorded, device; } Event;

static _Atomic int capturing, held, violations, made;
static _Thread_local int mode; /* global */
static _Thread_local int current; /* device */

void fake_device(int device) { current = device; }

void fake_capture(int on) { capturing = on; }
void fake_hold(int on) { held = on; }
int fake_violations(void) { return violations; }
int fake_events(void) { return made; }

#ifdef HIP
int hipGetDevice(int *device)
{
    *device = current;
    return OK;
}
#else
int cuCtxGetCurrent(void **context)
{
    static int contexts[2];
    *context = &contexts[current];
    return OK;
}
#endif

int cuStreamIsCapturing(void *stream, int *status)
{
    *status = capturing && stream == (void *)1; /* the one stream that ever captures */
    return OK;
}

int cuThreadExchangeStreamCaptureMode(int *given)
{
    int before = mode;
    if (*given < 0 || *given > RELAXED) return INVALID;
    mode = *given;
    *given = before;
    return OK;
}

/* Unsafe calls end another thread's capture in the global mode, unless this thread is relaxed. */
static int unsafe(void)
{
    if (!capturing || mode == RELAXED) return 0;
    violations++;
    return 1;
}

int cuEventCreate(Event **event, unsigned flags)
{
    if (flags || unsafe()) return flags ? INVALID : UNSUPPORTED;
    made++;
    *event = calloc(1, sizeof **event);
    (*event)->device = current;
    return OK;
}

int cuEventRecord(Event *event, void *stream)
{
    struct timespec t;
    /* Nor can an event be recorded on a stream of another device. */
    if ((capturing && stream == (void *)1) || event->device != current) {
        violations++;
        return UNSUPPORTED;
    }
    clock_gettime(CLOCK_MONOTONIC, &t);
    event->ms = (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
    event->recorded = 1;
    return OK;
}

int cuEventQuery(Event *event)
{
    if (unsafe()) return UNSUPPORTED;
    return event->recorded && held ? NOT_READY : OK;
}

int cuEventElapsedTime(float *ms, Event *start, Event *end)
{
    if (!start->recorded || !end->recorded) return INVALID;
    *ms = (float)(end->ms - start->ms);
    return OK;
}
