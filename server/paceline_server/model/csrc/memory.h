// Large memory on huge pages: with pages of 4 kB a good part of the time goes into looking up addresses.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "pool.h"

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

// Memory for what lives equally long, one thing behind the other: those smaller than a huge page share one.
class Arena {
 public:
  // Uninitialised memory for `count` values, from a line of the cache on; throws std::bad_alloc.
  template <class T>
  T* take(size_t count) {
    constexpr size_t kLine = 64, kSlabBytes = size_t{32} << 20;
    const size_t bytes = (count * sizeof(T) + kLine - 1) / kLine * kLine;
    if (bytes > left_) {
      const size_t slab = bytes > kSlabBytes ? bytes : kSlabBytes;
      slabs_.push_back(allocate<char>(slab));
      next_ = slabs_.back().get();
      left_ = slab;
    }
    T* const taken = reinterpret_cast<T*>(next_);
    next_ += bytes;
    left_ -= bytes;
    return taken;
  }

 private:
  std::vector<Memory<char>> slabs_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

struct Unmap {
  size_t bytes = 0;
  void operator()(void* memory) const { munmap(memory, bytes); }
};

template <class T>
using Mapping = std::unique_ptr<T[], Unmap>;

// `count` zeros, claimed now: memory that is short must be missed here, not at some later write. All threads claim,
// because it is the system that zeroes the pages, at the time of a write. Throws std::bad_alloc.
template <class T>
Mapping<T> map_zeros(Pool& pool, size_t count) {
  constexpr size_t kPage = 4096, kTaskBytes = size_t{16} << 20;
  const size_t bytes = count * sizeof(T);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  Mapping<T> mapping(static_cast<T*>(memory), {bytes});
  madvise(memory, bytes, MADV_HUGEPAGE);
  pool.run(static_cast<int>((bytes + kTaskBytes - 1) / kTaskBytes), [&](int task) {
    const size_t begin = size_t(task) * kTaskBytes, behind = begin + kTaskBytes < bytes ? begin + kTaskBytes : bytes;
    for (size_t at = begin; at < behind; at += kPage) static_cast<volatile char*>(memory)[at] = 0;
  });
  return mapping;
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
