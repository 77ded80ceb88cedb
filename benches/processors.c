/* Processors that change nothing, to measure the cost of calling them. */

#include "inflight_logits_processor.h"

static int32_t nothing(void *context, inflight_logits_entry *entry) {
  (void)context, (void)entry;
  return 0;
}

static void nothing_batched(void *context, inflight_logits_entry *entries, size_t num_entries) {
  (void)context, (void)entries, (void)num_entries;
}

static const inflight_logits_processor PROCESSORS[] = {
    {.name = "nothing", .process = nothing},
    {.name = "nothing_batched", .process_batch = nothing_batched},
};

static const inflight_logits_table TABLE = {
    .abi_version = INFLIGHT_LOGITS_ABI_VERSION,
    .num_processors = sizeof PROCESSORS / sizeof *PROCESSORS,
    .processors = PROCESSORS,
};

const inflight_logits_table *inflight_get_logits_processors(void) { return &TABLE; }
