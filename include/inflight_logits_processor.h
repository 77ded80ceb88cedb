/* Logits post-processors for `inflight`, a backend of Triton Inference Server.
 *
 * A model loads a shared library with your own processors if its config.pbtxt names it:
 *
 *     parameters { key: "logits_post_processor_library" value: { string_value: "/opt/my/libprocessors.so" } }
 *
 * It exports one function, inflight_get_logits_processors(), which returns a table of named processors. A request
 * selects one of them with the option logits_post_processor_name, and may pass it logits_post_processor_args. If
 * anything is wrong with the library (no such file, no such function, another ABI version, a duplicate name, the name
 * of a built-in processor), the model fails to load, with the reason; the server keeps running.
 *
 * The life of a request that names a processor:
 *
 *     create           once, when the request is read
 *     process          once for each token to be chosen, before the request's guide, biases, penalties and temperature; or
 *                      process_batch, once for all requests of a step that name the processor. It must accept several
 *                      entries of one request, with one state, and entries for tokens that are discarded later. The
 *                      beams of a request come one by one
 *     destroy          once, when the request has ended, however it ended; not if create failed
 *
 * A request for several sequences (n, best_of) is several requests here, each with an id and a state of its own.
 *
 * THE CONTRACT
 *
 * The library runs inside the server. The backend checks what it can (below); a processor that breaks the rest can
 * take the server down.
 *
 * Memory. A processor may write to `logits[0 .. vocab_size - 1]`, to `error`, to `status`, to `*state` during create,
 *   and to its own memory. It may only read everything else, and only until the function returns; it must not keep
 *   pointers. `logits` is a copy made for this call, so no other logits are adjacent to it.
 * Threads. All functions may be called on several threads at once, for different requests. Calls with the state of one
 *   request come one at a time, but not always on the same thread. process_batch of a processor may run at the same
 *   time for different instances of a model, with different requests.
 * Time. The step waits: while create, destroy, process or process_batch runs, no request of the model instance makes
 *   progress. A cancelled request leaves at the end of the step.
 * Errors. create and process return zero on success. On failure they return nonzero and may write a message to `error`,
 *   in UTF-8 and zero-terminated. The request ends with that message as its error; no other request is affected.
 *   process_batch reports the same in the `status` of each entry.
 * Exceptions. A C++ exception, a Rust panic or a longjmp that leaves one of these functions ends the server's process.
 *   Catch everything, and return an error.
 * Determinism. The resulting logits may depend on the logits, tokens, arguments and ids of the entry, and on nothing
 *   else: not on time, other requests, or the rest of the batch, and on earlier calls only as far as the tokens reflect
 *   them. The state may save work, but be prepared for tokens that do not continue those of the last call. Otherwise a
 *   request no longer gets the same answer alone and in a batch.
 * Processes and threads. A processor must not fork, change signal handlers, or leave threads running when the last
 *   state that it created is destroyed: the library is closed when its model is unloaded, and opened again with the
 *   next load. Two models that name the same file share one copy of its global variables.
 *
 * WHAT IS CHECKED
 *
 * After every call the backend checks that 256 bytes before and after `logits` are unchanged, and that every logit is a
 * number below +infinity (-infinity rules a token out). If either check fails, the request fails with an error that
 * names the processor. Writes elsewhere go undetected.
 */

#ifndef INFLIGHT_LOGITS_PROCESSOR_H
#define INFLIGHT_LOGITS_PROCESSOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented whenever anything below changes; a library of another version is refused. */
#define INFLIGHT_LOGITS_ABI_VERSION 2u

/* Size of every `error` in bytes, including the terminating zero. It is empty before a call. */
#define INFLIGHT_LOGITS_ERROR_SIZE 512u

/* A request that names a processor. */
typedef struct inflight_logits_request {
  /* The backend's own id of the request; unique within a model instance. */
  uint64_t request_id;
  /* The request id that the client gave, in UTF-8; NULL if there is none. */
  const char *client_request_id;
  /* The option client_id, which any number of requests may share; 0 if there is none. */
  uint64_t client_id;
  /* 1 if the request has a client_id, else 0. */
  uint32_t has_client_id;
  /* Number of logits per token. */
  uint32_t vocab_size;
  /* The request's logits_post_processor_args; empty if it gave none. Never more than 65536 bytes. */
  const char *arguments;
} inflight_logits_request;

/* A token to be chosen: its logits, and the tokens before it. */
typedef struct inflight_logits_entry {
  /* As in inflight_logits_request. */
  uint64_t request_id;
  const char *client_request_id;
  uint64_t client_id;
  uint32_t has_client_id;
  /* The beam of the request; 0 without beam search. */
  uint32_t beam;
  /* How many of `tokens` are the prompt; the rest is output. */
  uint32_t num_prompt_tokens;
  uint32_t num_tokens;
  uint32_t vocab_size;
  /* [num_tokens] */
  const uint32_t *tokens;
  /* [vocab_size], to be changed in place; in host memory, aligned to 64 bytes. With beam search these are
   * log-probabilities. */
  float *logits;
  /* Always NULL. TensorRT-LLM's processors get the stream on which the logits are computed; here they are ready when
   * the function is called, in host memory, and what it writes is used when it returns, on a GPU as well. */
  void *stream;
  /* The state that create returned for the request; NULL without create. */
  void *state;
  /* [INFLIGHT_LOGITS_ERROR_SIZE] */
  char *error;
  /* Zero before a call. process_batch sets it to nonzero for a request that has failed. */
  int32_t status;
} inflight_logits_entry;

typedef struct inflight_logits_processor {
  /* The name that requests use: 1 to 256 bytes of UTF-8. */
  const char *name;
  /* Passed to the functions unchanged. */
  void *context;
  /* Creates the state of a request. May be NULL; every state is NULL then. Returns nonzero if the arguments are not
   * acceptable. */
  int32_t (*create)(void *context, const inflight_logits_request *request, void **state, char *error);
  /* Frees a state; may be NULL. */
  void (*destroy)(void *context, void *state);
  /* Exactly one of the two must not be NULL. */
  int32_t (*process)(void *context, inflight_logits_entry *entry);
  void (*process_batch)(void *context, inflight_logits_entry *entries, size_t num_entries);
} inflight_logits_processor;

typedef struct inflight_logits_table {
  /* INFLIGHT_LOGITS_ABI_VERSION */
  uint32_t abi_version;
  /* 1 to 1024. */
  uint32_t num_processors;
  /* [num_processors] */
  const inflight_logits_processor *processors;
} inflight_logits_table;

/* Exported by the library. Called once when a model that names the library is loaded. The table, the processors and
 * their names must not change until the library is closed. */
const inflight_logits_table *inflight_get_logits_processors(void);

#ifdef __cplusplus
}
#endif

#endif
