/* Finds the real functions. The libraries are mostly opened RTLD_LOCAL, where RTLD_NEXT does not see
 * them, under versioned names: so the process's own list of loaded files is searched. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <string.h>

#include "gemmtune.h"

typedef struct {
    const char *library;
    char path[PATH_MAX];
} Search;

static int match(struct dl_phdr_info *info, size_t size, void *data)
{
    Search *search = data;
    const char *path = info->dlpi_name, *slash = strrchr(path, '/');
    (void)size;
    if (strncmp(slash ? slash + 1 : path, search->library, strlen(search->library))) return 0;
    if (strlen(path) >= sizeof search->path) return 0;
    strcpy(search->path, path);
    return 1;
}

static int ours(void *function)
{
    Dl_info theirs, own;
    return dladdr(function, &theirs) && dladdr((void *)&loaded, &own) &&
           theirs.dli_fbase == own.dli_fbase;
}

void *loaded(_Atomic(void *) *at, const char *library, const char *name)
{
    void *function = atomic_load_explicit(at, memory_order_acquire);
    if (function) return function;
    Search search = {.library = library};
    if (dl_iterate_phdr(match, &search)) {
        void *handle = dlopen(search.path, RTLD_LAZY | RTLD_NOLOAD);
        /* The handle is kept: the library must not go while we hold its functions. */
        if (handle) function = dlsym(handle, name);
    }
    if (!function) function = dlsym(RTLD_NEXT, name);
    if (!function || ours(function)) return NULL;
    atomic_store_explicit(at, function, memory_order_release);
    return function;
}
