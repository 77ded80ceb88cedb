/* Processors that do what the header forbids, or show what they are called with. */

#define _DEFAULT_SOURCE

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "inflight_logits_processor.h"

static uint32_t num_generated(const inflight_logits_entry *entry) { return entry->num_tokens - entry->num_prompt_tokens; }

/* The state is a copy of the arguments. */
static int32_t keep_arguments(void *context, const inflight_logits_request *request, void **state, char *error) {
  (void)context, (void)error;
  *state = strdup(request->arguments);
  return 0;
}

static void forget(void *context, void *state) {
  (void)context;
  free(state);
}

static int32_t refuse(void *context, const inflight_logits_request *request, void **state, char *error) {
  (void)context, (void)request, (void)state;
  strcpy(error, "never");
  return 1;
}

static int32_t nothing(void *context, inflight_logits_entry *entry) {
  (void)context, (void)entry;
  return 0;
}

/* Arguments: after how many tokens. */
static int32_t fail(void *context, inflight_logits_entry *entry) {
  (void)context;
  if (num_generated(entry) < (uint32_t)atoi(entry->state)) {
    return 0;
  }
  snprintf(entry->error, INFLIGHT_LOGITS_ERROR_SIZE, "enough after %u tokens", num_generated(entry));
  /* Nobody gets what a failed call has changed. */
  memset(entry->logits, 0, entry->vocab_size * sizeof *entry->logits);
  return 7;
}

static void fail_batch(void *context, inflight_logits_entry *entries, size_t num_entries) {
  for (size_t i = 0; i < num_entries; i++) {
    entries[i].status = fail(context, &entries[i]);
  }
}

static int32_t fail_silently(void *context, inflight_logits_entry *entry) {
  (void)context, (void)entry;
  return -3;
}

static int32_t shout(void *context, inflight_logits_entry *entry) {
  (void)context;
  memset(entry->error, 'x', INFLIGHT_LOGITS_ERROR_SIZE);
  entry->error[0] = (char)0xff;
  return 1;
}

static int32_t write_before(void *context, inflight_logits_entry *entry) {
  (void)context;
  entry->logits[-1] = 0;
  return 0;
}

static int32_t write_behind(void *context, inflight_logits_entry *entry) {
  (void)context;
  entry->logits[entry->vocab_size] = 0;
  return 0;
}

static void write_behind_batch(void *context, inflight_logits_entry *entries, size_t num_entries) {
  for (size_t i = 0; i < num_entries; i++) {
    write_behind(context, &entries[i]);
  }
}

static int32_t make_nan(void *context, inflight_logits_entry *entry) {
  (void)context;
  entry->logits[5] = NAN;
  return 0;
}

static int32_t make_infinity(void *context, inflight_logits_entry *entry) {
  (void)context;
  entry->logits[5] = INFINITY;
  return 0;
}

static int32_t rule_all_out(void *context, inflight_logits_entry *entry) {
  (void)context;
  for (uint32_t i = 0; i < entry->vocab_size; i++) {
    entry->logits[i] = -INFINITY;
  }
  return 0;
}

/* Arguments: for how many microseconds. */
static int32_t sleep_a_while(void *context, inflight_logits_entry *entry) {
  (void)context;
  usleep((useconds_t)atoi(entry->state));
  return 0;
}

/* Arguments: a file with a number of tokens, and no more are chosen as long as it is there. */
static int32_t wait_for_leave(void *context, inflight_logits_entry *entry) {
  (void)context;
  for (;;) {
    FILE *gate = fopen(entry->state, "r");
    unsigned allowed = 0;
    if (gate == NULL) {
      return 0;
    }
    const int is_number = fscanf(gate, "%u", &allowed) == 1;
    fclose(gate);
    if (is_number && num_generated(entry) < allowed) {
      return 0;
    }
    usleep(1000);
  }
}

/* The token that follows tells what the entry says. */
static int32_t tell(void *context, inflight_logits_entry *entry) {
  const char *name = entry->client_request_id;
  const uint32_t length = name == NULL ? 99 : (uint32_t)strlen(name);
  const uint32_t client = entry->has_client_id ? 1 + (uint32_t)(entry->client_id % 1000) : entry->client_id != 0;
  const uint32_t last = entry->tokens[entry->num_tokens - 1];
  const uint32_t told =
      (last + 2 * entry->num_tokens + 3 * entry->num_prompt_tokens + 5 * length + 7 * entry->beam + client) %
      entry->vocab_size;
  if (strcmp(context, "context") != 0 || entry->stream != NULL || entry->error[0] != 0 || entry->status != 0) {
    return 1;
  }
  rule_all_out(context, entry);
  entry->logits[told] = 0;
  return 0;
}

/* Writes down what it is called with. Arguments: the name of a file. */
static void note(const char *file, const char *what, uint64_t number) {
  FILE *diary = fopen(file, "a");
  fprintf(diary, "%s %llu\n", what, (unsigned long long)number);
  fclose(diary);
}

static int32_t note_create(void *context, const inflight_logits_request *request, void **state, char *error) {
  note(request->arguments, "create", request->request_id);
  return keep_arguments(context, request, state, error);
}

static void note_destroy(void *context, void *state) {
  note(state, "destroy", 0);
  forget(context, state);
}

static int32_t note_process(void *context, inflight_logits_entry *entry) {
  (void)context;
  note(entry->state, "process", num_generated(entry));
  return 0;
}

static int32_t note_beam(void *context, inflight_logits_entry *entry) {
  (void)context;
  note(entry->state, "beam", entry->beam);
  return 0;
}

static void note_batch(void *context, inflight_logits_entry *entries, size_t num_entries) {
  (void)context;
  note(entries[0].state, "batch", num_entries);
}

#define KEEPING .create = keep_arguments, .destroy = forget
#define NOTING .create = note_create, .destroy = note_destroy

static const inflight_logits_processor PROCESSORS[] = {
    {.name = "nothing", .process = nothing},
    {.name = "refuses", .create = refuse, .destroy = forget, .process = nothing},
    {.name = "fails", KEEPING, .process = fail},
    {.name = "fails_batched", KEEPING, .process_batch = fail_batch},
    {.name = "fails_silently", .process = fail_silently},
    {.name = "shouts", .process = shout},
    {.name = "writes_before", .process = write_before},
    {.name = "writes_behind", .process = write_behind},
    {.name = "writes_behind_batched", .process_batch = write_behind_batch},
    {.name = "makes_nan", .process = make_nan},
    {.name = "makes_infinity", .process = make_infinity},
    {.name = "rules_all_out", .process = rule_all_out},
    {.name = "sleeps", KEEPING, .process = sleep_a_while},
    {.name = "waits", KEEPING, .process = wait_for_leave},
    {.name = "tells", .context = "context", .process = tell},
    {.name = "notes", NOTING, .process = note_process},
    {.name = "notes_beams", KEEPING, .process = note_beam},
    {.name = "notes_batched", NOTING, .process_batch = note_batch},
};

static const inflight_logits_table TABLE = {
    .abi_version = INFLIGHT_LOGITS_ABI_VERSION,
    .num_processors = sizeof PROCESSORS / sizeof *PROCESSORS,
    .processors = PROCESSORS,
};

const inflight_logits_table *inflight_get_logits_processors(void) { return &TABLE; }
