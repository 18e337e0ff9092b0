// Kills the process before its k-th call that changes a file, counted from arm(k) on. For LD_PRELOAD.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static volatile long armed, last, count;

void arm(long k) { count = 0; last = k; armed = 1; }
long disarm(void) { armed = 0; return count; }

static void tick(void) {
    if (armed && __sync_add_and_fetch(&count, 1) == last) kill(getpid(), SIGKILL);
}

static void tick_file(int fd) {
    struct stat info;
    if (armed && fstat(fd, &info) == 0 && (S_ISREG(info.st_mode) || S_ISDIR(info.st_mode))) tick();
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define PATH(name, parameters, ...) int name parameters { NEXT(name); tick(); return next(__VA_ARGS__); }
#define FILE_(type, name, parameters, ...) type name parameters { NEXT(name); tick_file(fd); return next(__VA_ARGS__); }

PATH(rename, (const char *a, const char *b), a, b)
PATH(renameat, (int d, const char *a, int e, const char *b), d, a, e, b)
PATH(renameat2, (int d, const char *a, int e, const char *b, unsigned f), d, a, e, b, f)
PATH(unlink, (const char *a), a)
PATH(unlinkat, (int d, const char *a, int f), d, a, f)
PATH(mkdir, (const char *a, mode_t m), a, m)
PATH(mkdirat, (int d, const char *a, mode_t m), d, a, m)
PATH(rmdir, (const char *a), a)
PATH(chmod, (const char *a, mode_t m), a, m)
PATH(linkat, (int d, const char *a, int e, const char *b, int f), d, a, e, b, f)
FILE_(int, fsync, (int fd), fd)
FILE_(int, fdatasync, (int fd), fd)
FILE_(int, ftruncate, (int fd, off_t n), fd, n)
FILE_(ssize_t, write, (int fd, const void *p, size_t n), fd, p, n)
FILE_(ssize_t, writev, (int fd, const struct iovec *v, int n), fd, v, n)
FILE_(ssize_t, pwrite, (int fd, const void *p, size_t n, off_t o), fd, p, n, o)
FILE_(ssize_t, pwrite64, (int fd, const void *p, size_t n, off64_t o), fd, p, n, o)

#define OPEN(name, first, ...)                                        \
    int name(first, const char *path, int flags, ...) {               \
        NEXT(name);                                                   \
        mode_t mode = 0;                                              \
        if (flags & (O_CREAT | O_TMPFILE)) {                          \
            va_list rest;                                             \
            va_start(rest, flags);                                    \
            mode = va_arg(rest, mode_t);                              \
            va_end(rest);                                             \
        }                                                             \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT)) tick();            \
        return next(__VA_ARGS__, path, flags, mode);                  \
    }

OPEN(openat, int d, d)
OPEN(openat64, int d, d)

#define OPEN_(name)                                                   \
    int name(const char *path, int flags, ...) {                      \
        NEXT(name);                                                   \
        mode_t mode = 0;                                              \
        if (flags & (O_CREAT | O_TMPFILE)) {                          \
            va_list rest;                                             \
            va_start(rest, flags);                                    \
            mode = va_arg(rest, mode_t);                              \
            va_end(rest);                                             \
        }                                                             \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT)) tick();            \
        return next(path, flags, mode);                               \
    }

OPEN_(open)
OPEN_(open64)
