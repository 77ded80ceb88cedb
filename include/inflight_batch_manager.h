/* The batch manager of `inflight` for applications in C and C++: in-flight batching over a checkpoint, without Triton.
 *
 * The application has callbacks, as with TensorRT-LLM's Batch Manager. A manager has a thread of its own, on which it
 * calls them:
 *
 *     start of a step    get_requests          adds the requests that join
 *     end of a step      send_response         for each request with something new
 *                        poll_stop_signals     names the requests that are to be stopped
 *                        return_stats          the step's record; not while nothing is active
 *
 * Link libinflight_embed.a (cargo build --release -p inflight-embed), and let the linker drop what nobody calls:
 *
 *     cc app.c libinflight_embed.a -Wl,--gc-sections -lpthread -ldl -lm
 *
 * REQUESTS AND RESPONSES are tensors by name. A request has `input_ids` (INT32 [1, prompt]) and `request_output_len`
 * (INT32 [1]), and may have `end_id`, `pad_id`, `beam_width`, `runtime_top_k`, `min_length` (INT32 [1]), `temperature`,
 * `runtime_top_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `len_penalty`,
 * `beam_search_diversity_rate` (FP32 [1]), `random_seed` (UINT64 [1]), `early_stopping`, `return_log_probs`,
 * `return_context_logits`, `return_generation_logits` (BOOL [1]) and `embedding_bias` (FP32 [vocabulary]). A response has
 *
 *     output_ids           INT32 [1, beams, max_seq_len]: prompt and output, filled up with pad_id; where the request
 *                          streams [1, beams, new]: what is new, and of beams the output as it is
 *     sequence_length      INT32 [1, beams]: tokens of prompt and output so far
 *     context_logits       FP32 [1, prompt, vocabulary], or a dummy [1, 1, 1]
 *     generation_logits    FP32 [1, beams, output, vocabulary], or a dummy [1, 1, 1, 1]
 *     output_log_probs     FP32 [1, beams, output]: on request, and with beams
 *     cum_log_probs        FP32 [1, beams]: on request, and with beams
 *
 * A request that does not stream has one response, the final one. A response with an error has no tensors, and is final.
 *
 * THE CONTRACT
 *
 * Pointers that a function is given are good until it returns, whoever calls it; nobody keeps them. `context` and the
 * functions of inflight_callbacks stay until inflight_batch_manager_destroy or _join returns. Callbacks are called one after the
 * other, on the manager's thread; the step waits for them. Nothing may be thrown out of them. They may not call
 * inflight_batch_manager_destroy or _join. Everything else may be called from any thread.
 */

#ifndef INFLIGHT_BATCH_MANAGER_H
#define INFLIGHT_BATCH_MANAGER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Counted up whenever anything below changes. */
#define INFLIGHT_BATCH_MANAGER_VERSION 1u

/* Bytes of every `error`, the zero at the end included. */
#define INFLIGHT_BATCH_MANAGER_ERROR_SIZE 512u

/* What the elements of a tensor are. */
enum { INFLIGHT_BOOL = 1, INFLIGHT_INT32 = 2, INFLIGHT_UINT64 = 3, INFLIGHT_FP32 = 4 };

typedef struct inflight_tensor {
  const char *name;
  /* INFLIGHT_BOOL, one byte an element, to INFLIGHT_FP32 */
  uint32_t data_type;
  /* At most 8. */
  uint32_t num_dims;
  /* [num_dims] */
  const int64_t *shape;
  /* Row by row, in the machine's byte order; aligned as the caller likes. */
  const void *data;
  uint64_t num_bytes;
} inflight_tensor;

typedef struct inflight_request {
  /* Unique among the requests in flight; free again after the final response. */
  uint64_t request_id;
  /* Who has sent it, for logits post-processors; not unique. Of no account unless has_client_id is 1. */
  uint64_t client_id;
  uint32_t has_client_id;
  /* 1: each step's news are sent at once. 0: there is one response, at the end. */
  uint32_t is_streaming;
  /* [num_tensors] */
  const inflight_tensor *tensors;
  uint64_t num_tensors;
} inflight_request;

/* The requests that join a step. */
typedef struct inflight_batch inflight_batch;

/* Copies a request into the batch. Not zero: it is not what this header says, and is not in the batch. */
int32_t inflight_batch_add(inflight_batch *batch, const inflight_request *request);

/* The requests that are to be stopped. */
typedef struct inflight_stops inflight_stops;

/* Has a request stopped, if it is in flight: it gets a final response, with what it has. */
void inflight_stops_add(inflight_stops *stops, uint64_t request_id);

typedef struct inflight_callbacks {
  /* INFLIGHT_BATCH_MANAGER_VERSION */
  uint32_t version;
  /* Passed to the functions as it is. */
  void *context;
  /* Adds at most `max_num_requests` requests to the batch; negative is unbounded. Called at the start of every step, and
   * every millisecond while nothing is active. Not zero: there will be no more. */
  int32_t (*get_requests)(void *context, int32_t max_num_requests, inflight_batch *batch);
  /* Takes what is new of a request; with the final response all that the manager knew of it is freed. `error` is empty
   * unless the request has failed. */
  void (*send_response)(void *context, uint64_t request_id, const inflight_tensor *tensors, uint64_t num_tensors,
                        int32_t is_final, const char *error);
  /* Says that a request was not taken because its id is that of one in flight, which goes on: every response with that
   * id is its. */
  void (*reject_duplicate)(void *context, uint64_t request_id);
  /* May be NULL. */
  void (*poll_stop_signals)(void *context, inflight_stops *stops);
  /* A record, as a JSON object with the field names of TensorRT-LLM's Batch Manager. May be NULL. */
  void (*return_stats)(void *context, const char *json);
} inflight_callbacks;

typedef struct inflight_batch_manager inflight_batch_manager;

/* Loads a checkpoint and begins to serve. `options` is a JSON object with the names and values of a model's config.pbtxt:
 *
 *     {"gpt_model_path": "my_checkpoint", "gpt_model_type": "inflight_fused_batching", "max_beam_width": 1,
 *      "batch_scheduler_policy": "guaranteed_no_evict", "max_num_requests": 8, "max_num_active": 64,
 *      "max_num_tokens": 512, "max_seq_len": 2048, "max_tokens_in_paged_kv_cache": 16384, "tokens_per_block": 32,
 *      "enable_kv_cache_reuse": true, "enable_chunked_context": true, "enable_trt_overlap": false, "num_threads": 4}
 *
 * of which only gpt_model_path has to be given. NULL: it could not; `error` [INFLIGHT_BATCH_MANAGER_ERROR_SIZE] says why,
 * in UTF-8, ended by zero. */
inflight_batch_manager *inflight_batch_manager_create(const char *options, const inflight_callbacks *callbacks,
                                                      char *error);

/* Has it ask for requests at once, if it has nothing to do. */
void inflight_batch_manager_wake(inflight_batch_manager *manager);

/* Waits until get_requests has said that there will be no more and all have ended, and frees the manager. Not zero: as
 * below. */
int32_t inflight_batch_manager_join(inflight_batch_manager *manager);

/* Asks for no more requests, waits until all that are active have ended, and frees the manager. Not zero: a step has
 * failed, and every request in flight has had a final response with the error. */
int32_t inflight_batch_manager_destroy(inflight_batch_manager *manager);

#ifdef __cplusplus
}
#endif

#endif
