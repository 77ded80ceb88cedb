/* The batch manager in an application in C: reads prompts of token ids and prints each answer when it is complete.
 *
 *     embed '{"gpt_model_path": "CHECKPOINT_FOLDER"}' NUM_NEW_TOKENS "1 2 3" "4 5" ...
 *
 * The first argument are the options of the manager. Each prompt is a request; every second one streams. Prints a line
 * per response, `ID: TOKEN ... [final LOG_PROBABILITY]`, and at the end the number of statistics records.
 *
 * It computes on several ranks, too: of processes that are this program again, and of those of mpirun.
 *
 *     embed '{..., "tensor_parallel_size": 2, "rank_program": "./embed"}' ...
 *     mpirun -n 2 embed '{..., "tensor_parallel_size": 2, "rank_transport": "mpi"}' ... */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inflight_batch_manager.h"

enum { MAX_PROMPT = 256 };

struct application {
  char **prompts;
  int num_prompts;
  int num_sent;
  int32_t num_new_tokens;
  int num_records;
};

/* Adds waiting prompts until the manager has no more room. */
static int32_t get_requests(void *context, int32_t max_num_requests, inflight_batch *batch) {
  struct application *application = context;
  for (int32_t n = 0; n != max_num_requests && application->num_sent < application->num_prompts; n++) {
    const int id = application->num_sent++;
    int32_t ids[MAX_PROMPT];
    int64_t num_ids = 0;
    char *next = application->prompts[id];
    for (char *end; num_ids < MAX_PROMPT; next = end) {
      const long token = strtol(next, &end, 10);
      if (end == next) {
        break;
      }
      ids[num_ids++] = (int32_t)token;
    }
    const int64_t prompt_shape[] = {1, num_ids};
    const int64_t one[] = {1};
    const uint8_t is_true = 1;
    const inflight_tensor tensors[] = {
        {"input_ids", INFLIGHT_INT32, 2, prompt_shape, ids, (uint64_t)num_ids * sizeof *ids},
        {"request_output_len", INFLIGHT_INT32, 1, one, &application->num_new_tokens, sizeof(int32_t)},
        {"return_log_probs", INFLIGHT_BOOL, 1, one, &is_true, sizeof is_true},
    };
    const inflight_request request = {
        .request_id = (uint64_t)id, .is_streaming = id % 2 != 0, .tensors = tensors, .num_tensors = 3};
    char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE];
    if (inflight_batch_add(batch, &request, error) != 0) {
      fprintf(stderr, "request %d: %s\n", id, error);
      exit(1);
    }
  }
  return application->num_sent == application->num_prompts;
}

static const inflight_tensor *find(const inflight_tensor *tensors, uint64_t num_tensors, const char *name) {
  for (uint64_t n = 0; n < num_tensors; n++) {
    if (strcmp(tensors[n].name, name) == 0) {
      return &tensors[n];
    }
  }
  return NULL;
}

static void send_response(void *context, uint64_t request_id, const inflight_tensor *tensors, uint64_t num_tensors,
                          int32_t is_final, const char *error) {
  (void)context;
  printf("%llu:", (unsigned long long)request_id);
  if (error[0] != 0) {
    printf(" error: %s", error);
  } else {
    const int32_t *ids = find(tensors, num_tensors, "output_ids")->data;
    const int64_t num_ids = find(tensors, num_tensors, "output_ids")->shape[2];
    const int32_t length = *(const int32_t *)find(tensors, num_tensors, "sequence_length")->data;
    /* A whole answer is padded to max_seq_len. */
    for (int64_t n = 0; n < num_ids && n < length; n++) {
      printf(" %d", ids[n]);
    }
    if (is_final) {
      printf(" final %.9g", *(const float *)find(tensors, num_tensors, "cum_log_probs")->data);
    }
  }
  putchar('\n');
}

static void reject_duplicate(void *context, uint64_t request_id) {
  (void)context;
  fprintf(stderr, "request %llu is already in flight\n", (unsigned long long)request_id);
}

static void return_stats(void *context, const char *json) {
  struct application *application = context;
  application->num_records += strstr(json, "\"Timestamp\":\"") != NULL;
}

int main(int argc, char **argv) {
  if (argc == 2 && strncmp(argv[1], "rank=", 5) == 0) {
    /* Rank 0, which is this program too, has started it. */
    return inflight_rank_main();
  }
  if (argc < 4) {
    fprintf(stderr, "usage: embed OPTIONS NUM_NEW_TOKENS PROMPT ...\n");
    return 2;
  }
  struct application application = {
      .prompts = argv + 3, .num_prompts = argc - 3, .num_new_tokens = (int32_t)atoi(argv[2])};
  const inflight_callbacks callbacks = {
      .version = INFLIGHT_BATCH_MANAGER_VERSION,
      .context = &application,
      .get_requests = get_requests,
      .send_response = send_response,
      .reject_duplicate = reject_duplicate,
      .return_stats = return_stats,
  };
  char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE];
  inflight_batch_manager *manager = inflight_batch_manager_create(argv[1], &callbacks, error);
  if (manager == NULL) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  const int32_t failed = inflight_batch_manager_join(manager);
  inflight_leave_mpi();
  /* Other ranks of mpirun are asked for nothing. */
  if (application.num_sent > 0) {
    printf("%d records\n", application.num_records);
  }
  return failed != 0;
}
