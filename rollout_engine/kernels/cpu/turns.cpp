// `turns.h` for Python.
#include "turns.h"

extern "C" {

int64_t turns_bytes() { return sizeof(Turns); }

// Whether all ranks have come; false: broken.
int32_t turns_meet(Turns* turns, int32_t ranks) { return turns->meet(ranks); }

void turns_break(Turns* turns) { turns->broken.store(1, std::memory_order_release); }

int32_t turns_are_broken(const Turns* turns) { return turns->broken.load(std::memory_order_acquire); }
}
