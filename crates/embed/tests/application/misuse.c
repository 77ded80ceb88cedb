/* Calls every function of the header with arguments that it must refuse, and prints those that it did not:
 * misuse CHECKPOINT_FOLDER. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "inflight_batch_manager.h"

/* A valid request: the first two of the tensors. The rest has room for more. */
static inflight_request request_of(inflight_tensor tensors[4]) {
  tensors[0] = (inflight_tensor){"input_ids", INFLIGHT_INT32, 2, PROMPT, IDS, sizeof IDS};
  tensors[1] = (inflight_tensor){"request_output_len", INFLIGHT_INT32, 1, ONE, &LENGTH, sizeof LENGTH};
  return (inflight_request){.tensors = tensors, .num_tensors = 2};
}

/* Every way in which a request can violate the header. Each must have the error that contains its words. */
static void check_invalid_requests(inflight_executor *executor) {
  static const int64_t negative[] = {1, -3};
  static const int64_t huge[] = {INT64_MAX, INT64_MAX};
  static const int64_t none[] = {1, 0};
  enum { NUM_CASES = 17 };
  for (int n = 0; n < NUM_CASES; n++) {
    inflight_tensor tensors[4];
    inflight_request request = request_of(tensors);
    const char *words = "";
    switch (n) {
      case 0: tensors[0].name = NULL; words = "name is NULL"; break;
      case 1: tensors[0].name = "\xff\xfe"; words = "not UTF-8"; break;
      case 2: tensors[0].shape = NULL; words = "a shape that is NULL"; break;
      case 3: tensors[0].data = NULL; words = "data that is NULL"; break;
      case 4: tensors[0].data_type = 0; words = "unknown data_type 0"; break;
      case 5: tensors[0].data_type = UINT32_MAX; words = "unknown data_type 4294967295"; break;
      case 6: tensors[0].num_dims = 9; words = "9 dimensions"; break;
      case 7: tensors[0].num_dims = UINT32_MAX; words = "4294967295 dimensions"; break;
      case 8: tensors[0].num_bytes = UINT64_MAX; words = "which does not match INT32 [1, 3]"; break;
      case 9: tensors[0].num_bytes = 8; words = "has 8 bytes"; break;
      case 10: tensors[0].shape = negative; words = "[1, -3]"; break;
      case 11: tensors[0].shape = huge; words = "[9223372036854775807, 9223372036854775807]"; break;
      case 12: request.tensors = NULL; words = "tensors are NULL"; break;
      case 13: request.num_tensors = UINT64_MAX; words = "at most 256"; break;
      case 14: tensors[1].name = "input_ids"; words = "'input_ids' is given twice"; break;
      case 15: tensors[0].shape = (const int64_t *)((const char *)PROMPT + 1); words = "not aligned"; break;
      case 16:
        tensors[0] = (inflight_tensor){"input_ids", INFLIGHT_INT32, 2, none, NULL, 0};
        tensors[1].name = "stop_words_list";
        words = "must have [1, 2, n]";
        break;
    }
    char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE] = "";
    uint64_t id = 77;
    const int32_t refused = inflight_executor_enqueue(executor, &request, &id, error);
    if (refused == 0 || id != 77 || strstr(error, words) == NULL) {
      printf("case %d: '%s' does not say '%s'\n", n, error, words);
      num_failures++;
    }
    /* Without room for the reason. */
    CHECK(inflight_executor_enqueue(executor, &request, NULL, NULL) != 0);
  }
}

static int32_t num_stats = 0;

static void count(void *context, const char *json) {
  (void)json;
  ++*(int32_t *)context;
}

static void check_executor(const char *checkpoint) {
  char json[4096];
  char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE] = "";
  snprintf(json, sizeof json, "{\"gpt_model_path\": \"%s\"}", checkpoint);
  inflight_executor_options options = {.version = INFLIGHT_BATCH_MANAGER_VERSION, .manager = json};

  CHECK(inflight_executor_create(NULL, error) == NULL && strstr(error, "NULL"));
  CHECK(inflight_executor_create(NULL, NULL) == NULL);
  options.version++;
  CHECK(inflight_executor_create(&options, error) == NULL && strstr(error, "rebuild the application"));
  options.version--;
  options.manager = NULL;
  CHECK(inflight_executor_create(&options, error) == NULL && strstr(error, "options may not be NULL"));
  options.manager = "{\"gpt_model_path\": \"\xff\"}";
  CHECK(inflight_executor_create(&options, error) == NULL && strstr(error, "not UTF-8"));
  options.manager = "{\"gpt_model_path\": 3}";
  CHECK(inflight_executor_create(&options, error) == NULL && strstr(error, "options are invalid"));
  /* A reason longer than the buffer is cut. */
  char long_json[2048];
  memset(long_json, 'x', sizeof long_json);
  memcpy(long_json, "{\"", 2);
  memcpy(long_json + sizeof long_json - 6, "\": 1}", 6);
  options.manager = long_json;
  CHECK(inflight_executor_create(&options, error) == NULL);
  CHECK(strlen(error) == INFLIGHT_BATCH_MANAGER_ERROR_SIZE - 1);

  inflight_tensor tensors[4];
  inflight_request request = request_of(tensors);
  uint64_t id = 0;
  CHECK(inflight_executor_enqueue(NULL, &request, &id, error) != 0);
  CHECK(inflight_executor_can_enqueue(NULL) == 0);
  CHECK(inflight_executor_await_responses(NULL, NULL, -1) == NULL);
  CHECK(inflight_executor_take_stats(NULL, count, &num_stats) == 0);
  CHECK(inflight_executor_shutdown(NULL) == 0 && inflight_executor_destroy(NULL) == 0);
  inflight_executor_cancel(NULL, 0);
  inflight_responses_free(NULL);

  /* One request waits at most, and no record is stored. */
  options.manager = json;
  options.max_queue_size = 1;
  inflight_executor *executor = inflight_executor_create(&options, error);
  if (executor == NULL) {
    printf("%s\n", error);
    num_failures++;
    return;
  }
  CHECK(inflight_executor_enqueue(executor, NULL, &id, error) != 0);
  check_invalid_requests(executor);
  inflight_executor_cancel(executor, UINT64_MAX);
  const uint64_t unknown = UINT64_MAX;
  inflight_responses *responses = inflight_executor_await_responses(executor, &unknown, -1);
  CHECK(responses != NULL && responses->num_responses == 0);
  inflight_responses_free(responses);
  responses = inflight_executor_await_responses(executor, NULL, INT64_MAX);
  CHECK(responses != NULL && responses->num_responses == 0);
  inflight_responses_free(responses);

  /* After all of that it still works. */
  CHECK(inflight_executor_can_enqueue(executor) == 1);
  CHECK(inflight_executor_enqueue(executor, &request, &id, error) == 0);
  CHECK(inflight_executor_shutdown(executor) == 0);
  CHECK(inflight_executor_shutdown(executor) == 0);
  CHECK(inflight_executor_can_enqueue(executor) == 0);
  CHECK(inflight_executor_enqueue(executor, &request, &id, error) != 0 && strstr(error, "shut down"));
  responses = inflight_executor_await_responses(executor, &id, 0);
  CHECK(responses->num_responses == 1 && responses->responses[0].is_final == 1);
  CHECK(responses->responses[0].request_id == id && responses->responses[0].error[0] == 0);
  CHECK(inflight_executor_take_stats(executor, NULL, NULL) == 0);
  CHECK(inflight_executor_take_stats(executor, count, &num_stats) == 0 && num_stats == 0);
  CHECK(inflight_executor_destroy(executor) == 0);
  /* The application's responses outlive the executor. */
  CHECK(strcmp(responses->responses[0].tensors[0].name, "context_logits") == 0);
  inflight_responses_free(responses);
}

static int32_t get_requests(void *context, int32_t max_num_requests, inflight_batch *batch) {
  (void)context;
  (void)max_num_requests;
  inflight_tensor tensors[4];
  inflight_request request = request_of(tensors);
  char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE] = "";
  CHECK(inflight_batch_add(NULL, &request, error) != 0 && strstr(error, "batch may not be NULL"));
  CHECK(inflight_batch_add(batch, NULL, error) != 0 && strstr(error, "request may not be NULL"));
  request.num_tensors = 257;
  CHECK(inflight_batch_add(batch, &request, error) != 0 && strstr(error, "257 tensors"));
  request.num_tensors = 2;
  tensors[1].num_bytes = 3;
  CHECK(inflight_batch_add(batch, &request, error) != 0 && strstr(error, "'request_output_len' has 3 bytes"));
  CHECK(inflight_batch_add(batch, &request, NULL) != 0);
  return 1;
}

static void send_response(void *context, uint64_t request_id, const inflight_tensor *tensors, uint64_t num_tensors,
                          int32_t is_final, const char *error) {
  (void)context;
  (void)tensors;
  printf("a response of %llu: %llu tensors, %d, %s\n", (unsigned long long)request_id,
         (unsigned long long)num_tensors, is_final, error);
  num_failures++;
}

static void reject_duplicate(void *context, uint64_t request_id) {
  (void)context;
  printf("%llu is rejected\n", (unsigned long long)request_id);
  num_failures++;
}

static void check_manager(const char *checkpoint) {
  char json[4096];
  char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE] = "";
  snprintf(json, sizeof json, "{\"gpt_model_path\": \"%s\"}", checkpoint);
  inflight_callbacks callbacks = {.version = INFLIGHT_BATCH_MANAGER_VERSION,
                                  .get_requests = get_requests,
                                  .send_response = send_response,
                                  .reject_duplicate = reject_duplicate};
  CHECK(inflight_batch_manager_create(json, NULL, error) == NULL && strstr(error, "callbacks may not be NULL"));
  CHECK(inflight_batch_manager_create(NULL, &callbacks, error) == NULL && strstr(error, "options may not be NULL"));
  callbacks.version = 1;
  CHECK(inflight_batch_manager_create(json, &callbacks, error) == NULL && strstr(error, "version 1"));
  callbacks.version = INFLIGHT_BATCH_MANAGER_VERSION;
  callbacks.send_response = NULL;
  CHECK(inflight_batch_manager_create(json, &callbacks, NULL) == NULL);
  callbacks.send_response = send_response;
  inflight_batch_manager_wake(NULL);
  CHECK(inflight_batch_manager_join(NULL) == 0 && inflight_batch_manager_destroy(NULL) == 0);
  inflight_stops_add(NULL, 1);

  inflight_batch_manager *manager = inflight_batch_manager_create(json, &callbacks, error);
  if (manager == NULL) {
    printf("%s\n", error);
    num_failures++;
    return;
  }
  CHECK(inflight_batch_manager_join(manager) == 0);
}

int main(int argc, char **argv) {
  if (argc != 2) {
    return 2;
  }
  check_executor(argv[1]);
  check_manager(argv[1]);
  /* No manager has used MPI. */
  inflight_leave_mpi();
  printf("%d failures\n", num_failures);
  return num_failures != 0;
}
