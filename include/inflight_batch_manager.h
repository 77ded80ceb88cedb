/* The batch manager of `inflight` for applications in C and C++: in-flight batching over a checkpoint, without Triton.
 *
 * There are two interfaces. Both compute on a thread of their own.
 *
 * inflight_batch_manager calls the application's callbacks, as TensorRT-LLM's Batch Manager does:
 *
 *     start of a step    get_requests          adds the requests that join
 *     end of a step      send_response         for each request with new outputs
 *                        poll_stop_signals     names the requests to stop
 *                        return_stats          the record of the step; not while nothing is active
 *
 * inflight_executor is called by the application, as TensorRT-LLM's Executor is: inflight_executor_enqueue,
 * inflight_executor_await_responses, inflight_executor_cancel, inflight_executor_shutdown.
 *
 * Link libinflight_embed.a (cargo build --release -p inflight-embed), and let the linker drop what is not called:
 *
 *     cc app.c libinflight_embed.a -Wl,--gc-sections -lpthread -ldl -lm
 *
 * REQUESTS AND RESPONSES are tensors by name. A request has
 *
 *     input_ids            INT32 [1, prompt]; with input_lengths (INT32 [1]), only that many of them are the prompt
 *     request_output_len   INT32 [1]: the most tokens to generate
 *
 * and may have
 *
 *     INT32 [1]            end_id, pad_id, beam_width, num_return_sequences (of the beams), min_tokens or min_length,
 *                          runtime_top_k, prompt_ignore_length, no_repeat_ngram_size
 *     FP32 [1]             temperature, runtime_top_p, runtime_top_p_min, runtime_top_p_decay, min_p, typical_p,
 *                          repetition_penalty, presence_penalty, frequency_penalty, len_penalty,
 *                          beam_search_diversity_rate
 *     UINT64 [1]           seed or random_seed
 *     BOOL [1]             early_stopping, return_log_probs, return_context_logits, return_generation_logits,
 *                          return_perf_metrics
 *     INT32 [1, 2, n]      stop_words_list, bad_words_list: token ids of all words, one word after the other, and in the
 *                          second row where each word ends among them, padded with -1; at most 64 words of 256 ids
 *     INT32 [1, n]         runtime_top_p_reset_ids (at most 16), draft_input_ids (the expected output)
 *     FP32 [vocabulary]    embedding_bias: added to the logits; minus infinity forbids a token
 *
 * A response has
 *
 *     output_ids           INT32 [1, beams, max_seq_len]: prompt and output, padded with pad_id; in a stream
 *                          [1, beams, new]: the new tokens, and with beams the whole output so far
 *     sequence_length      INT32 [1, beams]: tokens of prompt and output so far
 *     context_logits       FP32 [1, prompt, vocabulary], or a dummy [1, 1, 1]
 *     generation_logits    FP32 [1, beams, output, vocabulary], or a dummy [1, 1, 1, 1]
 *     output_log_probs     FP32 [1, beams, output]: on request, and with beams
 *     cum_log_probs        FP32 [1, beams]: on request, and with beams
 *     kv_cache_alloc_new_blocks, kv_cache_reused_blocks, kv_cache_alloc_total_blocks, total_draft_tokens,
 *     total_accepted_draft_tokens (INT32 [1]), acceptance_rate (FP32 [1]): with return_perf_metrics, at the end
 *
 * A request that does not stream gets one response, the final one. A response with an error has no tensors, and is
 * final.
 *
 * SEVERAL RANKS
 *
 * With tensor_parallel_size or pipeline_parallel_size above 1, as many processes as their product compute the model
 * together, each with its part of the weights and of the KV cache. Requests are given to rank 0 alone, which schedules,
 * samples, and sends the others what they need of each step; responses and statistics come from rank 0.
 * docs/src/ranks.md says when answers have the bits of one process.
 *
 * "rank_transport": "processes", the default: the application is rank 0, and creating the manager starts the others on
 * this host from the program `rank_program`. They end with the manager, and with the application, however that ends. By
 * default it is `inflight-rank` beside the application, or beside the shared library that has this archive. It can be
 * that of the backend, wherever it lies, with libtriton_inflight.so of the same build beside it, or any program that is
 * linked with this archive and calls inflight_rank_main: the application itself, too.
 *
 * "rank_transport": "mpi": the ranks are the processes that mpirun has started, and each of them creates the same
 * manager or executor; or those of other ranks than 0 are `inflight-rank --mpi`. On another rank than 0, creating it
 * returns as soon as all processes have come, no callback is called, and inflight_executor_can_enqueue is 0. Joining,
 * shutting down and destroying it wait until rank 0 has ended its own; the result is nonzero if this rank has failed,
 * or if rank 0 has ended without one. There is one such manager at a time, created in the same order on all ranks. In
 * the end, each process calls inflight_leave_mpi.
 *     MPI is used through the plug-in `mpi_library`, which `cargo xtask mpi` builds; by default it is
 * libinflight_mpi.so at the place named above. If the application uses MPI itself, it initialises it with
 * MPI_THREAD_MULTIPLE before the first manager, and finalises it after inflight_leave_mpi. Otherwise the manager does
 * both.
 *
 * THE CONTRACT
 *
 * Pointers passed to a function are valid until it returns; neither side keeps them. `context` and the functions of
 * inflight_callbacks must stay valid until inflight_batch_manager_destroy or _join returns. Callbacks are called one at
 * a time, on the manager's thread, and the step waits for them. They must not throw, and must not call
 * inflight_batch_manager_destroy or _join. All other functions may be called from any thread, but nothing may use an
 * object while or after it is freed. NULL in place of an object is refused, or has no effect.
 */

#ifndef INFLIGHT_BATCH_MANAGER_H
#define INFLIGHT_BATCH_MANAGER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented whenever anything below changes. */
#define INFLIGHT_BATCH_MANAGER_VERSION 4u

/* Size of every `error` in bytes, including the terminating zero. */
#define INFLIGHT_BATCH_MANAGER_ERROR_SIZE 512u

/* The type of a tensor's elements. */
enum { INFLIGHT_BOOL = 1, INFLIGHT_INT32 = 2, INFLIGHT_UINT64 = 3, INFLIGHT_FP32 = 4 };

typedef struct inflight_tensor {
  const char *name;
  /* INFLIGHT_BOOL (one byte per element) to INFLIGHT_FP32 */
  uint32_t data_type;
  /* At most 8. */
  uint32_t num_dims;
  /* [num_dims] */
  const int64_t *shape;
  /* In row-major order and the machine's byte order; any alignment. */
  const void *data;
  uint64_t num_bytes;
} inflight_tensor;

typedef struct inflight_request {
  /* Unique among the requests in flight; may be used again after the final response. An executor ignores it. */
  uint64_t request_id;
  /* Identifies the client to logits post-processors; need not be unique. Ignored unless has_client_id is 1. */
  uint64_t client_id;
  uint32_t has_client_id;
  /* 1: a response after each step with new outputs. 0: one response, at the end. */
  uint32_t is_streaming;
  /* [num_tensors] */
  const inflight_tensor *tensors;
  uint64_t num_tensors;
} inflight_request;

/* The requests that join a step. */
typedef struct inflight_batch inflight_batch;

/* Copies a request into the batch. Returns nonzero if the request does not conform to this header, with the reason in
 * `error` [INFLIGHT_BATCH_MANAGER_ERROR_SIZE], which may be NULL; it is not added then. */
int32_t inflight_batch_add(inflight_batch *batch, const inflight_request *request, char *error);

/* The requests to stop. */
typedef struct inflight_stops inflight_stops;

/* Stops a request if it is in flight: it gets a final response, with what it has. */
void inflight_stops_add(inflight_stops *stops, uint64_t request_id);

typedef struct inflight_callbacks {
  /* INFLIGHT_BATCH_MANAGER_VERSION */
  uint32_t version;
  /* Passed to the functions unchanged. */
  void *context;
  /* Adds at most `max_num_requests` requests to the batch; negative means no limit. Called at the start of every step,
   * and every millisecond while nothing is active. Returns nonzero if there will be no more requests than those it has
   * added: it is not called again. */
  int32_t (*get_requests)(void *context, int32_t max_num_requests, inflight_batch *batch);
  /* Receives the new outputs of a request. With the final response, the manager has freed everything it held for it.
   * `error` is empty unless the request has failed. */
  void (*send_response)(void *context, uint64_t request_id, const inflight_tensor *tensors, uint64_t num_tensors,
                        int32_t is_final, const char *error);
  /* Reports that a request was not accepted because its id is in use by one in flight. That one continues: every
   * response with the id belongs to it. May be NULL: send_response has the refusal then, final and with an error, like
   * that of any other request, and every other response with the id belongs to the one in flight. */
  void (*reject_duplicate)(void *context, uint64_t request_id);
  /* May be NULL. */
  void (*poll_stop_signals)(void *context, inflight_stops *stops);
  /* A record, as a JSON object with the field names of TensorRT-LLM's Batch Manager. May be NULL. */
  void (*return_stats)(void *context, const char *json);
} inflight_callbacks;

typedef struct inflight_batch_manager inflight_batch_manager;

/* Loads a checkpoint and starts serving. `options` is a JSON object with the parameters of a model's config.pbtxt:
 *
 *     {"gpt_model_path": "my_checkpoint", "gpt_model_type": "inflight_fused_batching", "max_beam_width": 1,
 *      "batch_scheduler_policy": "guaranteed_no_evict", "max_num_requests": 8, "max_num_active": 64,
 *      "max_num_tokens": 512, "max_seq_len": 2048, "max_tokens_in_paged_kv_cache": 16384, "tokens_per_block": 32,
 *      "enable_kv_cache_reuse": true, "enable_chunked_context": true, "enable_trt_overlap": false,
 *      "speculation": "none", "max_draft_tokens": 4, "enable_adaptive_drafts": true, "num_threads": 4,
 *      "deterministic": false, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank_transport": "processes",
 *      "rank_timeout_seconds": 30, "rank_load_timeout_seconds": 600,
 *      "rank_program": "inflight-rank", "mpi_library": "libinflight_mpi.so"}
 *
 * Only gpt_model_path is required; the last two are paths, and no parameters of config.pbtxt. Returns NULL on failure;
 * `error` [INFLIGHT_BATCH_MANAGER_ERROR_SIZE] then has the reason, in UTF-8 and zero-terminated. */
inflight_batch_manager *inflight_batch_manager_create(const char *options, const inflight_callbacks *callbacks,
                                                      char *error);

/* Makes an idle manager call get_requests at once. */
void inflight_batch_manager_wake(inflight_batch_manager *manager);

/* Waits until get_requests has returned nonzero and all requests have ended, and frees the manager. Returns nonzero as
 * inflight_batch_manager_destroy does. */
int32_t inflight_batch_manager_join(inflight_batch_manager *manager);

/* Stops calling get_requests, waits until all active requests have ended, and frees the manager. Returns nonzero if a
 * step has failed; every request in flight has then had a final response with the error. */
int32_t inflight_batch_manager_destroy(inflight_batch_manager *manager);

typedef struct inflight_executor_options {
  /* INFLIGHT_BATCH_MANAGER_VERSION */
  uint32_t version;
  /* The JSON options of inflight_batch_manager_create. */
  const char *manager;
  /* The most requests that wait besides those in the batch manager; one more is refused. 0 is 65536. */
  uint64_t max_queue_size;
  /* The most statistics records that are stored, the latest ones; 0 stores none. */
  uint64_t max_num_statistics;
} inflight_executor_options;

typedef struct inflight_executor inflight_executor;

/* Loads a checkpoint and starts a thread that waits for requests. Returns NULL on failure; `error`
 * [INFLIGHT_BATCH_MANAGER_ERROR_SIZE], which may be NULL, then has the reason. */
inflight_executor *inflight_executor_create(const inflight_executor_options *options, char *error);

/* Copies a request into the queue, and writes the id that it gets to `request_id`, which may be NULL. Returns nonzero,
 * with the reason in `error` (as for inflight_executor_create), if a tensor is invalid, the queue is full, or the
 * executor is shut down. If only the batch manager refuses the request, because it is too long for instance, the error
 * is its response. */
int32_t inflight_executor_enqueue(const inflight_executor *executor, const inflight_request *request,
                                  uint64_t *request_id, char *error);

typedef struct inflight_response {
  uint64_t request_id;
  /* [num_tensors] */
  const inflight_tensor *tensors;
  uint64_t num_tensors;
  /* 1: the last response of the request. */
  int32_t is_final;
  /* Empty unless the request has failed. */
  const char *error;
} inflight_response;

/* Responses that the application owns. Only the functions below make and free them. */
typedef struct inflight_responses {
  /* [num_responses]; the responses of one request in order */
  const inflight_response *responses;
  uint64_t num_responses;
} inflight_responses;

/* Whether a request can be enqueued now: 0 if the queue is full, the executor is shut down, or this process is another
 * rank of mpirun than 0. */
int32_t inflight_executor_can_enqueue(const inflight_executor *executor);

/* Returns the stored responses of `*request_id`, or of all requests if `request_id` is NULL. If there are none, it
 * waits for the first, at most `timeout_ms`; negative means no limit. There are no responses if the time has passed, or
 * if none can come: every request has returned its final response, or the id is unknown. Responses are stored until
 * they are returned here, and returned once. The result must be freed with inflight_responses_free; it is NULL only if
 * `executor` is. */
inflight_responses *inflight_executor_await_responses(const inflight_executor *executor, const uint64_t *request_id,
                                                      int64_t timeout_ms);

/* Frees responses, with all that they point to. */
void inflight_responses_free(inflight_responses *responses);

/* Ends a request with the tokens that it has, in its final response. Does nothing if it has ended or is unknown. */
void inflight_executor_cancel(const inflight_executor *executor, uint64_t request_id);

/* Passes the statistics records since the last call to `return_stats`, on the caller's thread, as JSON objects with the
 * field names of TensorRT-LLM's Batch Manager. Returns their number. */
uint64_t inflight_executor_take_stats(const inflight_executor *executor,
                                      void (*return_stats)(void *context, const char *json), void *context);

/* Accepts no more requests, and waits until all enqueued ones have ended. Their responses can still be awaited. Returns
 * nonzero, the first time, if a step has failed: the requests have ended with that error. */
int32_t inflight_executor_shutdown(const inflight_executor *executor);

/* Calls inflight_executor_shutdown, returns its result, and frees the executor with all stored responses. Responses
 * that the application owns remain valid. */
int32_t inflight_executor_destroy(inflight_executor *executor);

/* Is another rank of the manager that has started this process, and returns the status to exit with. For a program that
 * is `rank_program`, in place of anything else: rank 0 starts it with one argument, `rank=` and a number, and a socket
 * as its standard input, and what it writes is written where rank 0 writes. This closes all other files, and ignores
 * SIGINT, SIGTERM and SIGHUP; the process ends with rank 0. With the argument --mpi it is what `inflight-rank --mpi`
 * is, by the plug-in beside the program. Returns 2 if the process was started by something else. */
int32_t inflight_rank_main(void);

/* Ends the part of this process in the processes of mpirun, if a manager has used MPI: waits until all of them call
 * this, and finalises MPI unless the application has initialised it. On rank 0 this ends `inflight-rank --mpi`. To be
 * called once, when no manager or executor is left; none can use MPI afterwards. */
void inflight_leave_mpi(void);

#ifdef __cplusplus
}
#endif

#endif
