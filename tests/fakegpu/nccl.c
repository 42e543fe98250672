/* NCCL between the processes of one machine, through a file that they map.

   Real: that a collective waits for all ranks, in a thread of its stream, while the host goes on; sums, minima,
   maxima, broadcasts, gathers; a hang if the ranks start different ones; the end of all that by an abort; the complaint
   about two ranks on one GPU. Not real: other machines, half precision sums, other collectives and operations, groups
   of calls (each is a job of its own), any speed. */
#define _GNU_SOURCE
#include "gpu.h"
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
enum { SUM, PROD, MAX, MIN };
#define RANKS 8
#define ROOM (4l << 20) /* bytes of a part of a collective */

typedef struct { char internal[128]; } Id;
typedef struct {
  atomic_int arrived, rounds;
  int gpus[RANKS];
  size_t asked[RANKS]; /* what each rank's collective is */
  char room[RANKS][ROOM];
} Shared;
typedef struct Comm { int rank, size, device; Shared *shared; atomic_int is_aborted; } Comm;

typedef struct Job {
  Comm *comm;
  void (*run)(struct Job *, size_t from, size_t bytes); /* a part of it */
  const char *in;
  char *out;
  size_t bytes;
  int type, op, peer;
} Job;

static const int widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static _Thread_local char fault[200];

static int pause_unless_aborted(Comm *comm, int turn) { return usleep(turn < 200 ? 20 : 500), comm->is_aborted; }

/* Returns whether all ranks have come here; if not, the communicator is aborted. */
static int meet(Comm *comm) {
  Shared *shared = comm->shared;
  int round = shared->rounds;
  if (atomic_fetch_add(&shared->arrived, 1) == comm->size - 1) {
    shared->arrived = 0;
    shared->rounds++;
    return 1;
  }
  for (int turn = 0; shared->rounds == round; turn++)
    if (pause_unless_aborted(comm, turn)) return 0;
  return 1;
}

#define COMBINE(type) { \
  type *sum = (type *)out; \
  for (size_t i = 0; i < bytes / sizeof(type); i++) { \
    type total = ((type *)shared->room[0])[i]; \
    for (int rank = 1; rank < size; rank++) { \
      type next = ((type *)shared->room[rank])[i]; \
      total = op == SUM ? total + next : (next < total) == (op == MIN) ? next : total; \
    } \
    sum[i] = total; \
  } \
  break; }

static void combine(Shared *shared, int size, int type, int op, char *out, size_t bytes) {
  switch (type) {
    case INT8: COMBINE(int8_t)
    case UINT8: COMBINE(uint8_t)
    case INT32: COMBINE(int32_t)
    case INT64: COMBINE(int64_t)
    case FLOAT32: COMBINE(float)
    case FLOAT64: COMBINE(double)
  }
}

static void all_reduce(Job *job, size_t from, size_t bytes) {
  Comm *comm = job->comm;
  memcpy(comm->shared->room[comm->rank], job->in + from, bytes);
  if (meet(comm)) combine(comm->shared, comm->size, job->type, job->op, job->out + from, bytes), meet(comm);
}
static void broadcast(Job *job, size_t from, size_t bytes) {
  Comm *comm = job->comm;
  if (comm->rank == job->peer) memcpy(comm->shared->room[0], job->in + from, bytes);
  if (meet(comm)) memcpy(job->out + from, comm->shared->room[0], bytes), meet(comm);
}
static void all_gather(Job *job, size_t from, size_t bytes) { /* job->bytes: of a rank's part */
  Comm *comm = job->comm;
  memcpy(comm->shared->room[comm->rank], job->in + from, bytes);
  if (!meet(comm)) return;
  for (int rank = 0; rank < comm->size; rank++)
    memcpy(job->out + rank * job->bytes + from, comm->shared->room[rank], bytes);
  meet(comm);
}
/* Returns once all ranks have started the same collective; if they start different ones, once it is aborted. */
static void agree(Job *job) {
  Comm *comm = job->comm;
  comm->shared->asked[comm->rank] = job->bytes * 31 + (size_t)job->run % 4096 + job->op + 7 * job->peer;
  if (!meet(comm)) return;
  int are_same = 1;
  for (int rank = 0; rank < comm->size; rank++) are_same &= comm->shared->asked[rank] == comm->shared->asked[comm->rank];
  while (!are_same && !comm->is_aborted) usleep(500);
}

static void run(void *argument) {
  Job *job = argument;
  agree(job);
  for (size_t from = 0; from < job->bytes && !job->comm->is_aborted; from += ROOM)
    job->run(job, from, job->bytes - from < ROOM ? job->bytes - from : ROOM);
  free(job);
}
static Status order(Job job, const char *name, const void *in, void *out, size_t count, Stream *stream) {
  count_collectives++;
  if ((in && kind_of(in) != DEVICE) || (out && kind_of(out) != DEVICE))
    return FAILED(INVALID_ARGUMENT, "%s: a buffer is not on the GPU", name);
  if (job.comm->device != current_device())
    return FAILED(INVALID_USAGE, "%s: device %d is current, the communicator's is %d", name, current_device(), job.comm->device);
  if (job.type > BFLOAT16 || (job.run == all_reduce && widths[job.type] == 2) || job.op == PROD || job.op > MIN)
    return FAILED(INVALID_ARGUMENT, "%s: type %d or operation %d is not modelled", name, job.type, job.op);
  Job *copy = malloc(sizeof *copy);
  *copy = job;
  copy->in = in;
  copy->out = out;
  copy->bytes = count * widths[job.type];
  return add_job(stream_of(stream), run, copy), OK;
}

Status ncclAllReduce(const void *in, void *out, size_t count, int type, int op, Comm *comm, Stream *stream) {
  return order((Job){comm, all_reduce, .type = type, .op = op}, "all_reduce", in, out, count, stream);
}
Status ncclBroadcast(const void *in, void *out, size_t count, int type, int root, Comm *comm, Stream *stream) {
  return order((Job){comm, broadcast, .type = type, .peer = root}, "broadcast", in, out, count, stream);
}
Status ncclBcast(void *buffer, size_t count, int type, int root, Comm *comm, Stream *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
Status ncclAllGather(const void *in, void *out, size_t count, int type, Comm *comm, Stream *stream) {
  return order((Job){comm, all_gather, .type = type}, "all_gather", in, out, count, stream);
}
/* Communicators */

Status ncclGetUniqueId(Id *id) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const char *folder = getenv("TMPDIR");
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%s/fakegpu-%d-%ld-%ld", folder ? folder : "/tmp", getpid(), (long)now.tv_sec, now.tv_nsec);
  return OK;
}
/* Waits for the other ranks, as NCCL's does. */
Status ncclCommInitRankConfig(Comm **result, int size, Id id, int rank, void *config) {
  Comm *comm = calloc(1, sizeof *comm);
  *comm = (Comm){.rank = rank, .size = size, .device = current_device()};
  int file = size > RANKS ? -1 : open(id.internal, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return SYSTEM_ERROR;
  comm->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  comm->shared->gpus[rank] = physical_device(comm->device);
  meet(comm);
  unlink(id.internal);
  for (int other = 0; other < size; other++) {
    if (other == rank || comm->shared->gpus[other] != comm->shared->gpus[rank]) continue;
    snprintf(fault, sizeof fault, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000", rank, other,
             16 * (comm->shared->gpus[rank] + 1));
    return INVALID_USAGE;
  }
  return *result = comm, OK;
}
Status ncclCommInitRank(Comm **comm, int size, Id id, int rank) { return ncclCommInitRankConfig(comm, size, id, rank, NULL); }
Status ncclCommInitRankScalable(Comm **comm, int size, int rank, int count, Id *ids, void *config) {
  return ncclCommInitRankConfig(comm, size, ids[0], rank, config);
}
Status ncclCommAbort(Comm *comm) {
  if (comm) comm->is_aborted = 1;
  return OK;
}
Status ncclCommDestroy(Comm *comm) { return OK; }
Status ncclCommFinalize(Comm *comm) { return OK; }
Status ncclCommGetAsyncError(Comm *comm, Status *error) { return *error = OK, OK; }
Status ncclCommCount(const Comm *comm, int *size) { return *size = comm->size, OK; }
Status ncclCommUserRank(const Comm *comm, int *rank) { return *rank = comm->rank, OK; }
Status ncclCommRegister(const Comm *comm, void *buffer, size_t size, void **handle) { return *handle = buffer, OK; }
Status ncclCommDeregister(const Comm *comm, void *handle) { return OK; }
Status ncclGroupStart(void) { return OK; }
Status ncclGroupEnd(void) { return OK; }
Status ncclGetVersion(int *version) { return *version = 23007, OK; }
const char *ncclGetErrorString(Status status) { return status == INVALID_USAGE ? "invalid usage" : status ? "made-up error" : "no error"; }
const char *ncclGetLastError(Comm *comm) { return fault; }
