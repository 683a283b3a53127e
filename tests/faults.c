// Fault injection: system calls that write below a folder fail from a chosen one on, as on a full disk.
//
// Preloaded into a process. `fault_arm(n)` lets n calls below $FAULT_FOLDER succeed; the next one and all later ones fail
// with ENOSPC (`fault_set(number)`: another error) until `fault_disarm`, which says how many calls there were.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long left = -1, seen = 0;
static int code = ENOSPC;

void fault_arm(long calls) { left = calls; seen = 0; }
void fault_set(int number) { code = number; }
long fault_disarm(void) { left = -1; return seen; }

static int inside(const char *path) {
  const char *folder = getenv("FAULT_FOLDER");
  return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int inside_file(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return inside(path);
}

// Whether this call fails.
static int fails(void) {
  if (left < 0) return 0;
  seen++;
  if (left > 0) { left--; return 0; }
  errno = code;
  return 1;
}

#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))
#define BY_FILE(result, name, parameters, arguments, file)                      \
  result name parameters {                                                      \
    if (left >= 0 && inside_file(file) && fails()) return -1;                   \
    return NEXT(result(*) parameters, #name) arguments;                         \
  }
#define BY_PATH(name, parameters, arguments, path)                              \
  int name parameters {                                                         \
    if (left >= 0 && inside(path) && fails()) return -1;                        \
    return NEXT(int(*) parameters, #name) arguments;                            \
  }

BY_FILE(ssize_t, write, (int f, const void *p, size_t n), (f, p, n), f)
BY_FILE(ssize_t, pwrite, (int f, const void *p, size_t n, off_t o), (f, p, n, o), f)
BY_FILE(ssize_t, pwrite64, (int f, const void *p, size_t n, off64_t o), (f, p, n, o), f)
BY_FILE(ssize_t, writev, (int f, const struct iovec *v, int n), (f, v, n), f)
BY_FILE(int, fsync, (int f), (f), f)
BY_FILE(int, fdatasync, (int f), (f), f)
BY_FILE(int, ftruncate, (int f, off_t n), (f, n), f)
BY_FILE(int, ftruncate64, (int f, off64_t n), (f, n), f)
BY_PATH(mkdir, (const char *p, mode_t m), (p, m), p)
BY_PATH(rename, (const char *a, const char *b), (a, b), b)
BY_PATH(renameat2, (int d, const char *a, int e, const char *b, unsigned g), (d, a, e, b, g), b)

size_t fwrite(const void *p, size_t size, size_t count, FILE *file) {
  if (left >= 0 && inside_file(fileno(file)) && fails()) return 0;
  return NEXT(size_t(*)(const void *, size_t, size_t, FILE *), "fwrite")(p, size, count, file);
}

#define OPEN(name)                                                              \
  int name(const char *path, int flags, ...) {                                  \
    va_list rest;                                                               \
    va_start(rest, flags);                                                      \
    mode_t mode = va_arg(rest, mode_t);                                         \
    va_end(rest);                                                               \
    if (left >= 0 && (flags & O_CREAT) && inside(path) && fails()) return -1;   \
    return NEXT(int (*)(const char *, int, ...), #name)(path, flags, mode);     \
  }
#define OPENAT(name)                                                            \
  int name(int folder, const char *path, int flags, ...) {                      \
    va_list rest;                                                               \
    va_start(rest, flags);                                                      \
    mode_t mode = va_arg(rest, mode_t);                                         \
    va_end(rest);                                                               \
    if (left >= 0 && (flags & O_CREAT) && inside(path) && fails()) return -1;   \
    return NEXT(int (*)(int, const char *, int, ...), #name)(folder, path, flags, mode); \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
