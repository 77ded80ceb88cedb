/* The minimal backend for iterative sequences: every Execute call sleeps for one step and reschedules its requests.
 * Its overhead besides the sleep is the server's own, and so the lower bound for every such backend.
 *
 * It has no model: a request ends after BARE_STEPS steps with a response of one token. Environment variables set the
 * step time (BARE_STEP_US), the steps per request (BARE_STEPS) and the file for its records (BARE_RECORDS), which have
 * the fields of the statistics file that the benchmark reads. Only for `cargo xtask bench steps`.
 *
 * The declarations follow Triton's `tritonbackend.h` and `tritonserver.h`, reduced to what is used.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct TRITONSERVER_Error TRITONSERVER_Error;
typedef struct TRITONBACKEND_Request Request;
typedef struct TRITONBACKEND_ResponseFactory Factory;
typedef struct TRITONBACKEND_ModelInstance Instance;
typedef struct TRITONBACKEND_Response Response;
typedef struct TRITONBACKEND_Output Output;

enum { RELEASE_ALL = 1, RELEASE_RESCHEDULE = 2, RESPONSE_FINAL = 1, TYPE_INT32 = 8, MEMORY_CPU = 0 };

TRITONSERVER_Error* TRITONBACKEND_RequestCorrelationId(Request*, uint64_t*);
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(Request*, uint32_t);
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryNew(Factory**, Request*);
TRITONSERVER_Error* TRITONBACKEND_ResponseFactorySendFlags(Factory*, uint32_t);
TRITONSERVER_Error* TRITONBACKEND_ResponseNewFromFactory(Response**, Factory*);
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(Response*, Output**, const char*, int, const int64_t*, uint32_t);
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(Output*, void**, uint64_t, int*, int64_t*);
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(Response*, uint32_t, TRITONSERVER_Error*);
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryDelete(Factory*);

/* Like the synthetic runner: a sleep may overrun, so the end of a wait spins. */
enum { SLEEP_SLACK_US = 150, MAX_RECORDS = 4096, MAX_SEQUENCES = 1024 };

static struct { double start_us, step_us, model_us; unsigned num_requests; } records[MAX_RECORDS];
static unsigned num_records;

/* Correlation ids of the sequences in flight, and their remaining steps. */
static struct { uint64_t id; long steps_left; } sequences[MAX_SEQUENCES];
static unsigned num_sequences;

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

static long number(const char* name) {
  const char* text = getenv(name);
  return text ? atol(text) : 0;
}

static void wait_until(double end_us) {
  double asleep_us = end_us - now_us() - SLEEP_SLACK_US;
  if (asleep_us > 0) {
    struct timespec asleep = {(time_t)(asleep_us / 1e6), (long)(asleep_us * 1e3) % 1000000000L};
    nanosleep(&asleep, NULL);
  }
  while (now_us() < end_us) {
  }
}

/* Returns whether this was the last step of the sequence. */
static int is_last_step(uint64_t id) {
  unsigned place = 0;
  while (place < num_sequences && sequences[place].id != id) place++;
  if (place == num_sequences) {
    if (num_sequences == MAX_SEQUENCES) return 1;
    sequences[num_sequences].id = id;
    sequences[num_sequences++].steps_left = number("BARE_STEPS");
  }
  if (--sequences[place].steps_left > 0) return 0;
  sequences[place] = sequences[--num_sequences];
  return 1;
}

static void send_final(Factory* factory) {
  const int64_t shape[] = {1, 1};
  Response* response = NULL;
  Output* output = NULL;
  void* buffer = NULL;
  int memory = MEMORY_CPU;
  int64_t memory_id = 0;
  TRITONBACKEND_ResponseNewFromFactory(&response, factory);
  TRITONBACKEND_ResponseOutput(response, &output, "output_ids", TYPE_INT32, shape, 2);
  TRITONBACKEND_OutputBuffer(output, &buffer, sizeof(int32_t), &memory, &memory_id);
  *(int32_t*)buffer = 1;
  TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, NULL);
}

static void write_records(void) {
  FILE* file = fopen(getenv("BARE_RECORDS"), "a");
  if (!file) return;
  for (unsigned n = 0; n < num_records; n++) {
    fprintf(file,
            "{\"Scheduled Requests\": %u, \"Step Start (us)\": %.3f, \"Step Duration (us)\": %.3f, "
            "\"Model Duration (us)\": %.3f}\n",
            records[n].num_requests, records[n].start_us, records[n].step_us, records[n].model_us);
  }
  fclose(file);
  num_records = 0;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(Instance* instance, Request** requests, uint32_t count) {
  (void)instance;
  double start_us = now_us();
  wait_until(start_us + number("BARE_STEP_US"));
  double model_us = now_us() - start_us;
  unsigned num_computed = 0;
  int any_ended = 0;
  for (uint32_t n = 0; n < count; n++) {
    uint64_t id = 0;
    TRITONBACKEND_RequestCorrelationId(requests[n], &id);
    num_computed += id != 0;
    if (id != 0 && !is_last_step(id)) {
      TRITONBACKEND_RequestRelease(requests[n], RELEASE_RESCHEDULE);
      continue;
    }
    Factory* factory = NULL;
    TRITONBACKEND_ResponseFactoryNew(&factory, requests[n]);
    TRITONBACKEND_RequestRelease(requests[n], RELEASE_ALL);
    if (id != 0) send_final(factory);
    else TRITONBACKEND_ResponseFactorySendFlags(factory, RESPONSE_FINAL);
    TRITONBACKEND_ResponseFactoryDelete(factory);
    any_ended = 1;
  }
  if (num_computed > 0 && num_records < MAX_RECORDS) {
    records[num_records].start_us = start_us;
    records[num_records].step_us = now_us() - start_us;
    records[num_records].model_us = model_us;
    records[num_records++].num_requests = num_computed;
  }
  if (any_ended && num_sequences == 0) write_records();
  return NULL;
}
