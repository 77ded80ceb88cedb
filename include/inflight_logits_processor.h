/* Logits post-processors for `inflight`, a backend of Triton Inference Server.
 *
 * A shared library with processors of your own is named in a model's config.pbtxt, and in no other way:
 *
 *     parameters { key: "logits_post_processor_library" value: { string_value: "/opt/my/libprocessors.so" } }
 *
 * It exports one function, inflight_get_logits_processors(), which gives a table of named processors. A request asks
 * for one of them with the option logits_post_processor_name, and may give it logits_post_processor_args. Whatever is
 * wrong with the library (no such file, no such function, another ABI version, a name twice, a name that the backend
 * has itself) fails the load of the model, with the reason; the server lives on.
 *
 * The life of a request that names a processor:
 *
 *     create           once, when the request is read
 *     process          once for each token that is to be chosen, before the request's guide, biases, penalties and
 *                      temperature; or process_batch, once for all requests of a step that name the processor. It
 *                      has to take several entries of one request, with one state, and entries for tokens that come
 *                      to nothing. The beams of a request come one by one
 *     destroy          once, when the request has ended, however it ended; not if create failed
 *
 * A request for several sequences (n, best_of) is several requests here, each with a number and a state of its own.
 *
 * THE CONTRACT
 *
 * The library runs inside the server. The backend checks what it can (below); a processor that breaks the rest can
 * take the server down.
 *
 * Memory. A processor may write to `logits[0 .. vocab_size - 1]`, to the text of `error`, to `status`, to `*state`
 *   during create, and to memory of its own. Everything else it may only read, and only until the function returns:
 *   it keeps no pointer that it was given. `logits` is a copy for this call, so that nobody else's logits lie near.
 * Threads. All functions may be called on several threads at the same time, for different requests. Those with the
 *   state of one request are called one after the other, though not always on the same thread; process_batch of a
 *   processor may run at the same time for different instances of a model, with other requests.
 * Time. The step waits: for as long as create, destroy, process or process_batch takes, no request of the model
 *   instance makes any progress. A cancelled request leaves at the end of the step.
 * Errors. create and process return zero, or something else if they cannot go on; then they may have written a text
 *   to `error`, in UTF-8 and ended by zero. The request ends with that text as its error, and nobody else notices.
 *   process_batch says the same for each of its entries, in its `status`.
 * Nothing may be thrown. A C++ exception, a Rust panic or a longjmp that would leave one of these functions ends the
 *   server's process. Catch everything, and return an error.
 * The same inputs give the same logits. What a processor does to the logits may depend on the logits, the tokens, the
 *   arguments and the numbers of the entry, and on nothing else: not on the time, not on other requests, not on what
 *   else is in a batch, not on earlier calls except as far as the tokens tell of them. Keep in the state what saves
 *   work, and be ready for tokens that do not continue those of the last call. Otherwise a request no longer gets
 *   alone what it gets in a batch.
 * Children. A processor must not fork, change signal handlers, or leave threads running when the last state that
 *   it made is destroyed: the library is closed when its model is unloaded, and opened anew with the next load. Two
 *   models that name the same file share one copy of its global variables.
 *
 * WHAT IS CHECKED
 *
 * After every call the backend looks whether 256 bytes before and behind `logits` are as they were, and whether every
 * logit is a number below +infinity (-infinity rules a token out). A processor that fails either fails its request
 * with an error that names the processor. A write farther away, and every write elsewhere, goes unseen.
 */

#ifndef INFLIGHT_LOGITS_PROCESSOR_H
#define INFLIGHT_LOGITS_PROCESSOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Counted up whenever anything below changes; a library of another version is refused. */
#define INFLIGHT_LOGITS_ABI_VERSION 2u

/* Bytes of every `error`, the zero at the end included. It is empty before a call. */
#define INFLIGHT_LOGITS_ERROR_SIZE 512u

/* A request that names a processor. */
typedef struct inflight_logits_request {
  /* The backend's number of the request; unique within a model instance. */
  uint64_t request_id;
  /* The request id that its client gave it, in UTF-8; NULL if there is none. */
  const char *client_request_id;
  /* Its option client_id, which as many requests as one likes may have in common; 0 if it has none. */
  uint64_t client_id;
  /* 1 if it has a client_id, else 0. */
  uint32_t has_client_id;
  /* Logits of a token. */
  uint32_t vocab_size;
  /* The request's logits_post_processor_args; empty if it gave none. Never more than 65536 bytes. */
  const char *arguments;
} inflight_logits_request;

/* A token that is to be chosen: its logits, and what came before it. */
typedef struct inflight_logits_entry {
  /* As in the inflight_logits_request. */
  uint64_t request_id;
  const char *client_request_id;
  uint64_t client_id;
  uint32_t has_client_id;
  /* Which of the request's beams it belongs to; 0 without beam search. */
  uint32_t beam;
  /* How many of `tokens` are the prompt; the others have been generated. */
  uint32_t num_prompt_tokens;
  uint32_t num_tokens;
  uint32_t vocab_size;
  /* [num_tokens] */
  const uint32_t *tokens;
  /* [vocab_size], to be changed in place; in host memory, aligned to 64 bytes. With beam search they are the logarithms
   * of the tokens' probabilities. */
  float *logits;
  /* The device stream on which the logits are; NULL on the CPU, where they are ready. */
  void *stream;
  /* What create made for the request; NULL without create. */
  void *state;
  /* [INFLIGHT_LOGITS_ERROR_SIZE] */
  char *error;
  /* Zero before a call. process_batch writes something else for a request that cannot go on. */
  int32_t status;
} inflight_logits_entry;

typedef struct inflight_logits_processor {
  /* What requests call it: 1 to 256 bytes of UTF-8. */
  const char *name;
  /* Passed to its functions as it is. */
  void *context;
  /* Makes the state of a request; may be NULL, and the state of every request is NULL then. Not zero: the arguments
   * are not what they should be. */
  int32_t (*create)(void *context, const inflight_logits_request *request, void **state, char *error);
  /* Frees what create made; may be NULL. */
  void (*destroy)(void *context, void *state);
  /* Exactly one of these two is not NULL. */
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

/* Exported by the library. Called once when a model that names it is loaded; the table, the processors and their
 * names stay as they are until the library is closed. */
const inflight_logits_table *inflight_get_logits_processors(void);

#ifdef __cplusplus
}
#endif

#endif
