// torch's own allocator of page-locked host memory, with memory that is only counted: what does it ask the driver for?
// Arguments: settings of the allocators, or "inherited" for those of the environment; then sizes to allocate one after the other, or "free" for the last of them.
// Prints each block that is made, and a minus before each that is given back.
#include <ATen/core/CachingHostAllocator.h>
#include <cstdlib>
#include <iostream>
#include <string>

struct Counted : at::CachingHostAllocatorImpl<c10::Stream, int> {
  void allocate_host_memory(size_t size, void** pointer) override {
    std::cout << size << " ";
    *pointer = reinterpret_cast<void*>(++count << 12);
  }
  void free_block(at::HostBlock<c10::Stream>* block) override { std::cout << "-" << block->size_ << " "; }
  size_t count = 0;
};

int main(int number, char** words) {
  if (std::string(words[1]) != "inherited") {
    c10::CachingAllocator::setAllocatorSettings(words[1]);
  }
  Counted allocator;
  std::pair<void*, void*> last;
  for (int index = 2; index < number; ++index) {
    if (std::string(words[index]) == "free") {
      allocator.free(last.second);
    } else {
      last = allocator.allocate(std::strtoull(words[index], nullptr, 10));
    }
  }
}
