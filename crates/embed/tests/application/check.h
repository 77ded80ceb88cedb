/* Counts failed checks, and has the tensors of a valid request. For a program of one file. */

#ifndef CHECK_H
#define CHECK_H

#include <stdint.h>
#include <stdio.h>

static int num_failures = 0;

static void check(int is_true, const char *what) {
  if (!is_true) {
    printf("not true: %s\n", what);
    num_failures++;
  }
}

#define CHECK(condition) check((condition) != 0, #condition)

static const int64_t ONE[] = {1};
static const int64_t PROMPT[] = {1, 3};
static const int32_t IDS[] = {5, 6, 7};
static const int32_t LENGTH = 4;

#endif
