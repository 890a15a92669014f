// Large memory on huge pages: with pages of 4 kB a good part of the time goes into looking up addresses.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace paceline {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

template <class T>
using Memory = std::unique_ptr<T[], Free>;

// Uninitialised memory for `count` values; throws std::bad_alloc.
template <class T>
Memory<T> allocate(size_t count) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t wanted = count * sizeof(T);
  const size_t alignment = wanted >= kHugePage ? kHugePage : 64;
  const size_t bytes = (wanted + alignment) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  if (alignment == kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
  return Memory<T>(static_cast<T*>(memory));
}

// Scratch memory that grows and is never initialised.
template <class T>
class Scratch {
 public:
  T* reserve(size_t count) {
    if (count > size_) {
      memory_.reset();
      memory_ = allocate<T>(count);
      size_ = count;
    }
    return memory_.get();
  }
  T* get() const { return memory_.get(); }

 private:
  Memory<T> memory_;
  size_t size_ = 0;
};

}  // namespace paceline
