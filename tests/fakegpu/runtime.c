/* CUDA's runtime in the host's memory.

   Real: memory and its limit (16 GiB for each device), copies, streams, events,
   FAKE_GPUS devices of which CUDA_VISIBLE_DEVICES shows some. Not real: kernels, which compute nothing and are
   counted; graphs; peers; any speed. */
#define _GNU_SOURCE
#include "gpu.h"
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_READY = 600 };
#define MAX_DEVICES 16
#define BYTES (1ul << 34) /* of each */
#define NOT_MODELLED(name) Status name(void) { return FAILED(801, #name " is not modelled"); }

#define DEFINE(name) atomic_long count_##name;
COUNTS(DEFINE)

/* Devices */

static int visible[MAX_DEVICES], devices = -1;
static _Thread_local int current;
static _Thread_local Status last; /* error */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Status fail(Status status) { return last = status; }

/* Reads FAKE_GPUS and CUDA_VISIBLE_DEVICES, whose list ends at the first device that is not there. */
static int count_devices(void) {
  pthread_mutex_lock(&lock);
  if (devices < 0) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    long all = atol(getenv("FAKE_GPUS"));
    for (devices = 0; !list && devices < all && devices < MAX_DEVICES; devices++) visible[devices] = devices;
    while (list && *list && devices < MAX_DEVICES) {
      char *end;
      long device = strtol(list + (strncmp(list, "GPU-", 4) ? 0 : 4), &end, 10);
      if (end == list || (*end && *end != ',') || device < 0 || device >= all) break;
      visible[devices++] = device;
      list = *end ? end + 1 : end;
    }
  }
  pthread_mutex_unlock(&lock);
  return devices;
}

int current_device(void) { return current; }
int physical_device(int device) { return visible[device]; }

Status cudaGetDeviceCount(int *count) { return (*count = count_devices()) ? OK : fail(NO_DEVICE); }
Status cudaGetDevice(int *device) { return count_devices() ? (*device = current, OK) : fail(NO_DEVICE); }
Status cudaSetDevice(int device) {
  return device < 0 || device >= count_devices() ? fail(INVALID_DEVICE) : (current = device, OK);
}
Status cudaDriverGetVersion(int *version) { return *version = 13000, OK; }
Status cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }
Status cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, OK; }
Status cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
Status cudaDeviceGetPCIBusId(char *text, int length, int device) {
  return snprintf(text, length, "0000:%02x:00.0", visible[device] + 1), OK;
}

/* cudaDeviceProp, as CUDA 13 lays it out: what torch reads of it, by its place. */
#define PUT(type, place, value) (*(type *)((char *)prop + place) = (value))
Status cudaGetDeviceProperties(void *prop, int device) {
  if (device < 0 || device >= count_devices()) return fail(INVALID_DEVICE);
  memset(prop, 0, 1008);
  snprintf(prop, 256, "Fake GPU %d", visible[device]);
  PUT(size_t, 288, BYTES); /* totalGlobalMem */
  PUT(int, 308, 32);                                   /* warpSize */
  PUT(int, 320, 1024);                                 /* maxThreadsPerBlock */
  PUT(int, 360, 9);                     /* major: bf16 is there */
  PUT(int, 384, 132);                   /* multiProcessorCount */
  PUT(int, 568, visible[device] + 1);   /* pciBusID */
  PUT(int, 604, 2048);                  /* maxThreadsPerMultiProcessor */
  return OK;
}
Status cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 1 ? 1024 : attribute == 10 ? 32 : attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
  return OK;
}

Status cudaGetLastError(void) { Status status = last; return last = OK, status; }
Status cudaPeekAtLastError(void) { return last; }

/* Memory */

static struct Block { char *start; size_t size; enum Kind kind; int device; } blocks[65536];
static int used; /* of blocks, some of them empty again */
static size_t taken[MAX_DEVICES];

static Status take(void **pointer, size_t size, enum Kind kind) {
  pthread_mutex_lock(&lock);
  if (kind == DEVICE && taken[current] + size > BYTES) {
    pthread_mutex_unlock(&lock);
    return fail(OUT_OF_MEMORY);
  }
  *pointer = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  int place = 0;
  while (place < used && blocks[place].start) place++;
  used += place == used;
  blocks[place] = (struct Block){*pointer, size, kind, current};
  taken[current] += kind == DEVICE ? size : 0;
  pthread_mutex_unlock(&lock);
  return OK;
}
static Status drop(void *pointer) {
  pthread_mutex_lock(&lock);
  for (int place = 0; pointer && place < used; place++) {
    struct Block *block = &blocks[place];
    if (block->start != pointer) continue;
    munmap(block->start, block->size ? block->size : 1);
    taken[block->device] -= block->kind == DEVICE ? block->size : 0;
    *block = (struct Block){0};
  }
  pthread_mutex_unlock(&lock);
  return OK;
}
static struct Block *find(const char *pointer) {
  for (int place = 0; place < used; place++) {
    struct Block *block = &blocks[place];
    if (block->start && pointer >= block->start && pointer < block->start + block->size) return block;
  }
  return NULL;
}
enum Kind kind_of(const void *pointer) {
  pthread_mutex_lock(&lock);
  struct Block *block = find(pointer);
  enum Kind kind = block ? block->kind : PAGEABLE;
  pthread_mutex_unlock(&lock);
  return kind;
}

Status cudaMalloc(void **pointer, size_t size) {
  count_mallocs++;
  return take(pointer, size, DEVICE);
}
Status cudaFree(void *pointer) { return drop(pointer); }
Status cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
  count_pinned_mallocs++;
  return take(pointer, size, PINNED);
}
Status cudaFreeHost(void *pointer) { return drop(pointer); }
Status cudaMemGetInfo(size_t *free, size_t *total) {
  *total = BYTES;
  return *free = *total - taken[current], OK;
}
Status cudaPointerGetAttributes(void *attributes, const void *pointer) {
  struct { int type, device; const void *on_device, *on_host; } *found = attributes;
  pthread_mutex_lock(&lock);
  struct Block *block = find(pointer);
  memset(attributes, 0, 88);
  found->type = !block ? 0 : block->kind == DEVICE ? 2 : 1;
  found->device = block ? block->device : 0;
  found->on_device = block ? pointer : NULL;
  found->on_host = block && block->kind == PINNED ? pointer : NULL;
  pthread_mutex_unlock(&lock);
  return OK;
}

/* Streams and events */

static Stream default_streams[MAX_DEVICES];

Stream *stream_of(Stream *handle) { return handle ? handle : &default_streams[current]; }

struct Queue { struct Job { void (*run)(void *); void *argument; struct Job *next; } *first, **end; };
static atomic_long unfinished; /* jobs */
static pthread_mutex_t queues = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void *work(void *argument) {
  Stream *stream = argument;
  while (1) {
    pthread_mutex_lock(&queues);
    while (!stream->queue->first) pthread_cond_wait(&changed, &queues);
    struct Job *job = stream->queue->first;
    if (!(stream->queue->first = job->next)) stream->queue->end = &stream->queue->first;
    pthread_mutex_unlock(&queues);
    job->run(job->argument);
    free(job);
    stream->done++;
    unfinished--;
  }
  return NULL;
}
void add_job(Stream *stream, void (*run)(void *), void *argument) {
  struct Job *job = malloc(sizeof *job);
  *job = (struct Job){run, argument, NULL};
  pthread_mutex_lock(&queues);
  int is_new = !stream->queue;
  if (is_new) {
    stream->queue = calloc(1, sizeof *stream->queue);
    stream->queue->end = &stream->queue->first;
  }
  stream->ordered++;
  unfinished++;
  *stream->queue->end = job;
  stream->queue->end = &job->next;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&queues);
  pthread_t thread;
  if (is_new) pthread_create(&thread, NULL, work, stream);
}
static void await(Stream *stream, long until) {
  for (int turn = 0; stream && stream->done < until; turn++) usleep(turn < 100 ? 20 : 500);
}
/* What follows is done by the host, at once: so the host waits for `stream`, as a device would. Not counted. */
void catch_up(Stream *handle) { await(stream_of(handle), stream_of(handle)->ordered); }

static Status new_stream(Stream **stream) { return *stream = calloc(1, sizeof **stream), OK; }
Status cudaStreamCreate(Stream **stream) { return new_stream(stream); }
Status cudaStreamCreateWithFlags(Stream **stream, unsigned flags) { return new_stream(stream); }
Status cudaStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) { return new_stream(stream); }
Status cudaStreamDestroy(Stream *stream) { return OK; } /* its thread may be at work */
Status cudaStreamGetPriority(Stream *stream, int *priority) { return *priority = 0, OK; }
Status cudaStreamQuery(Stream *handle) {
  Stream *stream = stream_of(handle);
  return stream->done < stream->ordered ? NOT_READY : OK;
}
Status cudaStreamSynchronize(Stream *handle) {
  count_stream_waits++;
  return catch_up(handle), OK;
}
Status cudaDeviceSynchronize(void) {
  count_device_waits++;
  while (unfinished) usleep(20);
  return OK;
}
Status cudaStreamWaitEvent(Stream *stream, Event *event, unsigned flags) { /* as catch_up does */
  return await(event->stream, event->until), OK;
}

static Status new_event(Event **event) { return *event = calloc(1, sizeof **event), OK; }
Status cudaEventCreate(Event **event) { return new_event(event); }
Status cudaEventCreateWithFlags(Event **event, unsigned flags) { return new_event(event); }
Status cudaEventDestroy(Event *event) { return free(event), OK; }
Status cudaEventRecord(Event *event, Stream *handle) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  Stream *stream = stream_of(handle);
  *event = (Event){stream, stream->ordered, now.tv_sec * 1e3 + now.tv_nsec * 1e-6};
  return OK;
}
Status cudaEventRecordWithFlags(Event *event, Stream *stream, unsigned flags) { return cudaEventRecord(event, stream); }
Status cudaEventQuery(Event *event) { return event->stream && event->stream->done < event->until ? NOT_READY : OK; }
Status cudaEventSynchronize(Event *event) {
  count_event_waits++;
  return await(event->stream, event->until), OK;
}
Status cudaEventElapsedTime(float *milliseconds, Event *start, Event *end) {
  return *milliseconds = end->at - start->at, OK;
}
Status cudaStreamIsCapturing(Stream *stream, int *status) { return *status = 0, OK; }
Status cudaStreamGetCaptureInfo(Stream *stream, int *status, void *id, void *graph, void *nodes, void *edges, void *n) {
  return *status = 0, OK;
}
Status cudaThreadExchangeStreamCaptureMode(int *mode) { return OK; }
Status cudaLaunchHostFunc(Stream *stream, void (*function)(void *), void *data) { return function(data), OK; }

/* Copies */

static void count(const void *to, const void *from, size_t size) {
  enum Kind target = kind_of(to), source = kind_of(from);
  if (target == DEVICE && source != DEVICE) {
    count_h2d++;
    count_h2d_bytes += size;
    count_h2d_pageable += source == PAGEABLE;
  } else if (target == DEVICE) {
    count_d2d++;
  } else {
    count_d2h += source == DEVICE;
  }
}
Status cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Stream *stream) {
  count(to, from, size);
  catch_up(stream);
  return memmove(to, from, size), OK;
}
Status cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  count_stream_waits++;
  return cudaMemcpyAsync(to, from, size, kind, NULL);
}
Status cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t size, Stream *stream) {
  return cudaMemcpyAsync(to, from, size, 0, stream);
}
Status cudaMemset(void *to, int value, size_t size) { return memset(to, value, size), OK; }
Status cudaMemsetAsync(void *to, int value, size_t size, Stream *stream) {
  catch_up(stream);
  return memset(to, value, size), OK;
}

/* Kernels */

static _Thread_local int allowed;
void allow_kernels(int are) { allowed = are; }

static Status launch(void) {
  if (allowed || count_kernels++) return OK;
  return FAILED(OK, "a kernel computes nothing: emulate.py has not replaced it");
}
Status cudaLaunchKernel(void) { return launch(); }
Status __cudaLaunchKernel(void) { return launch(); }
Status cudaLaunchKernelExC(void) { return launch(); }
Status cudaLaunchCooperativeKernel(void) { return launch(); }
Status __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, OK; }
Status cudaFuncGetAttributes(void *attributes, const void *function) {
  memset(attributes, 0, 144);
  int *found = (int *)((char *)attributes + 24); /* maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion */
  return found[0] = 1024, found[2] = found[3] = 90, OK;
}
Status cudaFuncSetAttribute(const void *function, int attribute, int value) { return OK; }
Status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int size, size_t shared) {
  return *blocks = 1, OK;
}
Status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int size, size_t shared, unsigned g) {
  return *blocks = 1, OK;
}

NOT_MODELLED(cudaDeviceEnablePeerAccess)
NOT_MODELLED(cudaMallocAsync)
NOT_MODELLED(cudaHostRegister)
NOT_MODELLED(cudaStreamBeginCapture)
