/* Logits post-processors in C: a stateless one, one with arguments, and one called once per step for all requests. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "inflight_logits_processor.h"

/* avoid_last: excludes the most recent token. */

static void avoid_last_of(inflight_logits_entry *entry) {
  const uint32_t last = entry->tokens[entry->num_tokens - 1];
  entry->logits[last] = -INFINITY;
}

static int32_t avoid_last(void *context, inflight_logits_entry *entry) {
  (void)context;
  avoid_last_of(entry);
  return 0;
}

/* avoid_last_batched: the same, called once per step. */

static void avoid_last_batched(void *context, inflight_logits_entry *entries, size_t num_entries) {
  (void)context;
  for (size_t i = 0; i < num_entries; i++) {
    avoid_last_of(&entries[i]);
  }
}

/* at_most: limits how many times a token occurs in the output. Arguments: TOKEN COUNT */

typedef struct at_most_state {
  uint32_t token;
  uint32_t count;
} at_most_state;

static int32_t at_most_create(void *context, const inflight_logits_request *request, void **state, char *error) {
  (void)context;
  at_most_state given;
  char more;
  if (sscanf(request->arguments, "%u %u %c", &given.token, &given.count, &more) != 2) {
    snprintf(error, INFLIGHT_LOGITS_ERROR_SIZE, "'%.80s' is not TOKEN COUNT", request->arguments);
    return 1;
  }
  if (given.token >= request->vocab_size) {
    snprintf(error, INFLIGHT_LOGITS_ERROR_SIZE, "token %u is not below %u", given.token, request->vocab_size);
    return 1;
  }
  at_most_state *made = malloc(sizeof *made);
  if (made == NULL) {
    snprintf(error, INFLIGHT_LOGITS_ERROR_SIZE, "out of memory");
    return 2;
  }
  *made = given;
  *state = made;
  return 0;
}

static void at_most_destroy(void *context, void *state) {
  (void)context;
  free(state);
}

static int32_t at_most(void *context, inflight_logits_entry *entry) {
  (void)context;
  const at_most_state *state = entry->state;
  uint32_t count = 0;
  for (uint32_t i = entry->num_prompt_tokens; i < entry->num_tokens; i++) {
    count += entry->tokens[i] == state->token;
  }
  if (count >= state->count) {
    entry->logits[state->token] = -INFINITY;
  }
  return 0;
}

static const inflight_logits_processor PROCESSORS[] = {
    {.name = "avoid_last", .process = avoid_last},
    {.name = "avoid_last_batched", .process_batch = avoid_last_batched},
    {.name = "at_most", .create = at_most_create, .destroy = at_most_destroy, .process = at_most},
};

static const inflight_logits_table TABLE = {
    .abi_version = INFLIGHT_LOGITS_ABI_VERSION,
    .num_processors = sizeof PROCESSORS / sizeof *PROCESSORS,
    .processors = PROCESSORS,
};

const inflight_logits_table *inflight_get_logits_processors(void) { return &TABLE; }
