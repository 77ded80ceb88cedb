// Types and constants of NCCL's API, as far as the stand-in implements it, with the values of NCCL 2.18's header.
#pragma once
#include "../api.h"

enum ncclResult_t : int {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
};

enum ncclDataType_t : int { ncclFloat32 = 7 };

enum ncclRedOp_t : int { ncclSum = 0 };

struct ncclUniqueId {
    char internal[128];
};

using ncclComm_t = struct ncclComm*;
