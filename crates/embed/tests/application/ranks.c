/* One executor and one manager after the other on the processes of mpirun: ranks OPTIONS. Prints what is not as it
 * should be. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "inflight_batch_manager.h"

static const inflight_tensor TENSORS[] = {
    {"input_ids", INFLIGHT_INT32, 2, PROMPT, IDS, sizeof IDS},
    {"request_output_len", INFLIGHT_INT32, 1, ONE, &LENGTH, sizeof LENGTH},
};
static const inflight_request REQUEST = {.tensors = TENSORS, .num_tensors = 2};

struct application {
  int is_rank_0;
  int num_asked;
  int num_finals;
};

static int32_t get_requests(void *context, int32_t max_num_requests, inflight_batch *batch) {
  struct application *application = context;
  CHECK(application->is_rank_0 && max_num_requests > 0);
  /* It is not asked again when it has added the last one. */
  CHECK(application->num_asked++ == 0);
  CHECK(inflight_batch_add(batch, &REQUEST, NULL) == 0);
  return 1;
}

static void send_response(void *context, uint64_t request_id, const inflight_tensor *tensors, uint64_t num_tensors,
                          int32_t is_final, const char *error) {
  struct application *application = context;
  (void)tensors;
  CHECK(request_id == 0 && num_tensors > 0 && error[0] == 0);
  application->num_finals += is_final;
}

static void reject_duplicate(void *context, uint64_t request_id) {
  (void)context;
  (void)request_id;
  CHECK(0);
}

static void count(void *context, const char *json) {
  *(int *)context += json[0] == '{';
}

static void check_executor(const char *json, int is_rank_0) {
  char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE] = "";
  const inflight_executor_options options = {
      .version = INFLIGHT_BATCH_MANAGER_VERSION, .manager = json, .max_num_statistics = 1000};
  inflight_executor *executor = inflight_executor_create(&options, error);
  if (executor == NULL) {
    printf("%s\n", error);
    num_failures++;
    return;
  }
  CHECK(inflight_executor_can_enqueue(executor) == is_rank_0);
  uint64_t id = 77;
  const int32_t refused = inflight_executor_enqueue(executor, &REQUEST, &id, error);
  CHECK(is_rank_0 ? refused == 0 : refused != 0 && id == 77 && strstr(error, "rank") != NULL);
  inflight_responses *responses = inflight_executor_await_responses(executor, NULL, -1);
  CHECK(responses->num_responses == (uint64_t)is_rank_0);
  inflight_responses_free(responses);
  inflight_executor_cancel(executor, id);
  CHECK(inflight_executor_shutdown(executor) == 0);
  CHECK(inflight_executor_can_enqueue(executor) == 0);
  int num_records = 0;
  inflight_executor_take_stats(executor, count, &num_records);
  CHECK((num_records > 0) == is_rank_0);
  CHECK(inflight_executor_destroy(executor) == 0);
}

static void check_manager(const char *json, int is_rank_0, int32_t (*end)(inflight_batch_manager *manager)) {
  char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE] = "";
  struct application application = {.is_rank_0 = is_rank_0};
  const inflight_callbacks callbacks = {.version = INFLIGHT_BATCH_MANAGER_VERSION,
                                        .context = &application,
                                        .get_requests = get_requests,
                                        .send_response = send_response,
                                        .reject_duplicate = reject_duplicate};
  inflight_batch_manager *manager = inflight_batch_manager_create(json, &callbacks, error);
  if (manager == NULL) {
    printf("%s\n", error);
    num_failures++;
    return;
  }
  inflight_batch_manager_wake(manager);
  CHECK(end(manager) == 0);
  if (end == inflight_batch_manager_join) {
    CHECK((application.num_asked > 0) == is_rank_0 && application.num_finals == is_rank_0);
  }
}

int main(int argc, char **argv) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK");
  if (argc != 2 || rank == NULL) {
    return 2;
  }
  const int is_rank_0 = strcmp(rank, "0") == 0;
  check_executor(argv[1], is_rank_0);
  check_manager(argv[1], is_rank_0, inflight_batch_manager_join);
  check_manager(argv[1], is_rank_0, inflight_batch_manager_destroy);
  const inflight_executor_options options = {.version = INFLIGHT_BATCH_MANAGER_VERSION, .manager = argv[1]};
  char error[INFLIGHT_BATCH_MANAGER_ERROR_SIZE] = "";
  if (!is_rank_0) {
    /* Rank 0 does not create it. */
    inflight_executor *executor = inflight_executor_create(&options, error);
    CHECK(executor != NULL && inflight_executor_destroy(executor) != 0);
  }
  inflight_leave_mpi();
  CHECK(inflight_executor_create(&options, error) == NULL && strstr(error, "has left the world of mpirun"));
  printf("%d failures\n", num_failures);
  return num_failures != 0;
}
