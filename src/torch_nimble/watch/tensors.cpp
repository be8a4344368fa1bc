// How many of these tensors are, one after another, where they were and not written since.
//
// Handles are those of torch's C interface, and `data_ptr` is a function of it; `version` is a method of
// at::Tensor. All three come from the torch that is there: this file needs no header of it and is compiled
// once for all of its versions. Nothing is thrown through the caller, which is not C++.

#include <cstddef>
#include <cstdint>

using Address = int32_t (*)(void *tensor, void **address);
using Version = int64_t (*)(const void *tensor);

extern "C" size_t torch_nimble_untouched(size_t count, void *const *tensors, void *const *addresses,
                                         const int64_t *versions, Address data_ptr, Version version) {
    size_t i = 0;
    try {
        for (; i < count; ++i) {
            void *address = nullptr;
            if (data_ptr(tensors[i], &address) != 0 || address != addresses[i]) break;
            if (versions[i] >= 0 && version(tensors[i]) != versions[i]) break;
        }
    } catch (...) {  // a tensor that has no version any more
    }
    return i;
}
