/* What the parts of the made-up GPU share. The prototypes of CUDA 13 and NCCL 2 in these files are written by hand,
   as far as torch calls them: no header of NVIDIA's is needed. */
#ifndef GPU_H
#define GPU_H
#include <stdatomic.h>
#include <stddef.h>

#define FAILED(value, ...) (fprintf(stderr, "made-up GPU: " __VA_ARGS__), fputc('\n', stderr), value)

typedef int Status; /* cudaError_t, ncclResult_t: 0 is success */

/* Work is done at once, on the host, by whoever orders it; only collectives take place later. They run one after the
   other in a thread of their stream, which makes `done` catch up with `ordered`. */
typedef struct Stream {
  atomic_long ordered, done;
  struct Queue *queue; /* of collectives; NULL if this stream has had none */
} Stream;

typedef struct Event {
  Stream *stream;
  long until; /* the event has happened once stream->done is so high */
  double at;  /* milliseconds */
} Event;

enum Kind { PAGEABLE, DEVICE, PINNED };
enum Kind kind_of(const void *pointer);
int current_device(void);       /* among the visible ones */
int physical_device(int device); /* its number on the machine */
Stream *stream_of(Stream *handle); /* handle: NULL is the default stream */
void add_job(Stream *stream, void (*run)(void *), void *argument);

/* What was asked of the GPU so far, by name, for emulate.py. h2d: copies from the host to the device; of those,
   from pageable memory, for which the host waits; d2h: copies back; *_waits: of the host. */
#define COUNTS(_) _(h2d) _(h2d_bytes) _(h2d_pageable) _(d2h) _(d2d) _(stream_waits) _(event_waits) _(device_waits) \
  _(mallocs) _(pinned_mallocs) _(collectives) _(kernels)
#define DECLARE(name) extern atomic_long count_##name;
COUNTS(DECLARE)
#endif
