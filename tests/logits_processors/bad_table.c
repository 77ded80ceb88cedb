/* A library that must not be loaded; WRONG says what is wrong with it. */

#include <stddef.h>

#include "inflight_logits_processor.h"

enum { VERSION = 1, NO_TABLE, EMPTY, MANY, NO_PROCESSORS, NO_NAME, EMPTY_NAME, TWICE, BUILT_IN, NEITHER, BOTH };

static int32_t process(void *context, inflight_logits_entry *entry) {
  (void)context, (void)entry;
  return 0;
}

static void process_batch(void *context, inflight_logits_entry *entries, size_t num_entries) {
  (void)context, (void)entries, (void)num_entries;
}

static const inflight_logits_processor PROCESSORS[] = {
    {.name = WRONG == NO_NAME ? NULL : WRONG == EMPTY_NAME ? "" : WRONG == BUILT_IN ? "ban_tokens" : "one",
     .process = WRONG == NEITHER ? NULL : process,
     .process_batch = WRONG == BOTH ? process_batch : NULL},
    {.name = WRONG == TWICE ? "one" : "two", .process = process},
};

static const inflight_logits_table TABLE = {
    .abi_version = WRONG == VERSION ? 1 : INFLIGHT_LOGITS_ABI_VERSION,
    .num_processors = WRONG == EMPTY ? 0 : WRONG == MANY ? 4000000000u : 2,
    .processors = WRONG == NO_PROCESSORS ? NULL : PROCESSORS,
};

const inflight_logits_table *inflight_get_logits_processors(void) { return WRONG == NO_TABLE ? NULL : &TABLE; }
