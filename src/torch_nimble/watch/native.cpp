// Loops over what a plan was made from, for `native.py`. Each tells how many are, one after another, as
// they were. Nothing is thrown through the caller, which is not C++.

#include <cstddef>
#include <cstdint>
#include <cstring>

// Handles of tensors are those of torch's C interface, and `data_ptr` is a function of it; `version` is a
// method of at::Tensor. They come from the torch that is there: no header of it is needed.
using Address = int32_t (*)(void *tensor, void **address);
using Version = int64_t (*)(const void *tensor);

extern "C" size_t tensors_as_they_were(size_t count, void *const *tensors, void *const *addresses,
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

// Objects that have a number of 64 bits at an offset of theirs.
extern "C" size_t objects_as_they_were(size_t count, const char *const *objects, const uint64_t *numbers,
                                       size_t offset) {
    size_t i = 0;
    for (; i < count; ++i) {
        uint64_t number;
        std::memcpy(&number, objects[i] + offset, sizeof number);
        if (number != numbers[i]) break;
    }
    return i;
}
