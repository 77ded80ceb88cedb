/* The executor in an application in C: enqueues prompts of token ids, and awaits the answers.
 *
 *     executor '{"gpt_model_path": "CHECKPOINT_FOLDER"}' NUM_NEW_TOKENS "1 2 3" "4 5" ...
 *
 * The first argument are the options of the manager, for several ranks as in embed.c. Each prompt is a request; every
 * second one streams. Prints a line per response, `ID: TOKEN ... [final LOG_PROBABILITY]`, and at the end the number of
 * statistics records. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inflight_batch_manager.h"

enum { MAX_PROMPT = 256 };

/* Enqueues a prompt; returns nonzero if it is refused. */
static int32_t enqueue(inflight_executor *executor, char *prompt, int is_streaming, int32_t num_new_tokens,
                       char *error) {
  int32_t ids[MAX_PROMPT];
  int64_t num_ids = 0;
  char *next = prompt;
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
      {"request_output_len", INFLIGHT_INT32, 1, one, &num_new_tokens, sizeof num_new_tokens},
      {"return_log_probs", INFLIGHT_BOOL, 1, one, &is_true, sizeof is_true},
  };
  const inflight_request request = {.is_streaming = is_streaming, .tensors = tensors, .num_tensors = 3};
  return inflight_executor_enqueue(executor, &request, NULL, error);
}

static const inflight_tensor *find(const inflight_response *response, const char *name) {
  for (uint64_t n = 0; n < response->num_tensors; n++) {
    if (strcmp(response->tensors[n].name, name) == 0) {
      return &response->tensors[n];
    }
  }
  return NULL;
}

static void print(const inflight_response *response) {
  printf("%llu:", (unsigned long long)response->request_id);
  if (response->error[0] != 0) {
    printf(" error: %s", response->error);
  } else {
    const inflight_tensor *output_ids = find(response, "output_ids");
    const int32_t *ids = output_ids->data;
    const int32_t length = *(const int32_t *)find(response, "sequence_length")->data;
    /* A whole answer is padded to max_seq_len. */
    for (int64_t n = 0; n < output_ids->shape[2] && n < length; n++) {
      printf(" %d", ids[n]);
    }
    if (response->is_final) {
      printf(" final %.9g", *(const float *)find(response, "cum_log_probs")->data);
    }
  }
  putchar('\n');
}

static void count(void *context, const char *json) {
  *(int *)context += strstr(json, "\"Timestamp\":\"") != NULL;
}

int main(int argc, char **argv) {
  if (argc == 2 && strncmp(argv[1], "rank=", 5) == 0) {
    return inflight_rank_main();
  }
  if (argc < 4) {
    fprintf(stderr, "usage: executor OPTIONS NUM_NEW_TOKENS PROMPT ...\n");
    return 2;
  }
  char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE];
  const inflight_executor_options options = {
      .version = INFLIGHT_BATCH_MANAGER_VERSION, .manager = argv[1], .max_num_statistics = 1000};
  inflight_executor *executor = inflight_executor_create(&options, error);
  if (executor == NULL) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  int num_open = 0;
  /* Other ranks of mpirun take no requests. */
  const int32_t is_serving = inflight_executor_can_enqueue(executor);
  for (int n = 3; is_serving && n < argc; n++) {
    if (enqueue(executor, argv[n], n % 2 == 0, atoi(argv[2]), error) == 0) {
      num_open++;
    } else {
      fprintf(stderr, "prompt %d: %s\n", n - 3, error);
    }
  }
  while (num_open > 0) {
    inflight_responses *responses = inflight_executor_await_responses(executor, NULL, 1000);
    for (uint64_t n = 0; n < responses->num_responses; n++) {
      print(&responses->responses[n]);
      num_open -= responses->responses[n].is_final;
    }
    inflight_responses_free(responses);
  }
  const int32_t failed = inflight_executor_shutdown(executor);
  int num_records = 0;
  inflight_executor_take_stats(executor, count, &num_records);
  if (is_serving) {
    printf("%d records\n", num_records);
  }
  inflight_executor_destroy(executor);
  inflight_leave_mpi();
  return failed != 0;
}
