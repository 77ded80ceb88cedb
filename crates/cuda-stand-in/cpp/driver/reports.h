// Messages to people, on standard error.
#pragma once
#include "../api.h"

namespace stand_in {

// Says why a call is refused, and returns the error that the real driver gives. Programs get only the number.
[[gnu::format(printf, 2, 3)]] CUresult refuse(CUresult error, const char* format, ...);

// Ends the process: the program has done what on a real GPU would silently give wrong results, or corrupt memory.
[[noreturn, gnu::format(printf, 1, 2)]] void die(const char* format, ...);

[[gnu::format(printf, 1, 2)]] void note(const char* format, ...);

}  // namespace stand_in
