/* Counts the calls that change files below a folder, and kills its own process before the k-th: for LD_PRELOAD.

   crash_arm(folder, k) starts counting (k = 0: never kill); crash_count() says how many there were. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t length;
static long at;
static atomic_long count;
static atomic_int armed;

void crash_arm(const char *where, long k) {
    strncpy(folder, where, sizeof folder - 1);
    length = strlen(folder), at = k;
    atomic_store(&count, 0), atomic_store(&armed, 1);
}

long crash_count(void) { return atomic_load(&count); }

static void hit(void) {
    if (atomic_fetch_add(&count, 1) + 1 == at) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
}

static int below(const char *path) {
    return strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static void by_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!atomic_load(&armed)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n > 0 && (path[n] = 0, below(path))) hit();
}

static void by_path(int dir, const char *path) {
    if (!atomic_load(&armed)) return;
    if (path[0] == '/') {
        if (below(path)) hit();
    } else if (dir != AT_FDCWD) {
        by_fd(dir);
    }
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define WRITES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)
#define MODE mode_t mode = 0; if (flags & O_CREAT) { va_list v; va_start(v, flags); mode = va_arg(v, mode_t); va_end(v); }
#define OPEN(name) int name(const char *path, int flags, ...) { MODE REAL(int, #name, const char *, int, ...); \
    if (flags & WRITES) { by_path(AT_FDCWD, path); } return real(path, flags, mode); }
#define OPENAT(name) int name(int dir, const char *path, int flags, ...) { MODE REAL(int, #name, int, const char *, int, ...); \
    if (flags & WRITES) { by_path(dir, path); } return real(dir, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define FD(type, name, arguments, ...) type name arguments { REAL(type, #name, FD_TYPES); by_fd(fd); return real(__VA_ARGS__); }
#define FD_TYPES int, const void *, size_t
FD(ssize_t, write, (int fd, const void *b, size_t n), fd, b, n)
#undef FD_TYPES
#define FD_TYPES int, const struct iovec *, int
FD(ssize_t, writev, (int fd, const struct iovec *v, int n), fd, v, n)
#undef FD_TYPES
#define FD_TYPES int, const void *, size_t, off_t
FD(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), fd, b, n, o)
FD(ssize_t, pwrite64, (int fd, const void *b, size_t n, off_t o), fd, b, n, o)
#undef FD_TYPES
#define FD_TYPES int, off_t
FD(int, ftruncate, (int fd, off_t n), fd, n)
FD(int, ftruncate64, (int fd, off_t n), fd, n)
#undef FD_TYPES
#define FD_TYPES int
FD(int, fsync, (int fd), fd)
FD(int, fdatasync, (int fd), fd)

int mkdir(const char *p, mode_t m) { REAL(int, "mkdir", const char *, mode_t); by_path(AT_FDCWD, p); return real(p, m); }
int mkdirat(int d, const char *p, mode_t m) { REAL(int, "mkdirat", int, const char *, mode_t); by_path(d, p); return real(d, p, m); }
int rmdir(const char *p) { REAL(int, "rmdir", const char *); by_path(AT_FDCWD, p); return real(p); }
int unlink(const char *p) { REAL(int, "unlink", const char *); by_path(AT_FDCWD, p); return real(p); }
int unlinkat(int d, const char *p, int f) { REAL(int, "unlinkat", int, const char *, int); by_path(d, p); return real(d, p, f); }
int link(const char *a, const char *b) { REAL(int, "link", const char *, const char *); by_path(AT_FDCWD, b); return real(a, b); }
int rename(const char *a, const char *b) { REAL(int, "rename", const char *, const char *); by_path(AT_FDCWD, b); return real(a, b); }
int renameat(int d, const char *a, int e, const char *b) { REAL(int, "renameat", int, const char *, int, const char *); by_path(e, b); return real(d, a, e, b); }
int renameat2(int d, const char *a, int e, const char *b, unsigned f) { REAL(int, "renameat2", int, const char *, int, const char *, unsigned); by_path(e, b); return real(d, a, e, b, f); }
