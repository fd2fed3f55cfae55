// A simulated accelerator, for tests on machines without one: memory, streams, events and pinned memory as a GPU has
// them, in the memory of the host.
//
// A stream is a thread that does what is queued in order. Copies between pinned and device memory lag, so that whoever
// does not wait for them reads old values. An operator waits for the current stream and runs on the CPU. Freed memory is
// filled with ones once its stream and those recorded on it have come so far, and kept for the next allocation.
//
// The device counts what would make a program wait on a GPU: host_waits().
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace py = pybind11;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr auto kLag = std::chrono::microseconds(500);
constexpr int64_t kMaxStreams = 64;

std::mutex waits_mutex;
std::vector<std::string> waits;
thread_local bool in_operator = false;

void count_wait(const char* what) {
  if (!in_operator) {
    std::lock_guard<std::mutex> lock(waits_mutex);
    waits.emplace_back(what);
  }
}

// Never destroyed: threads of streams run until the process ends.
class Queue {
 public:
  int64_t push(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
    works_.push_back(std::move(work));
    changed_.notify_all();
    return ++pushed_;
  }

  int64_t pushed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return pushed_;
  }

  bool is_done(int64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= ticket;
  }

  void wait(int64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= ticket; });
  }

 private:
  void run() {
    in_operator = true;  // what the device itself does is no wait of the host
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !works_.empty(); });
        work = std::move(works_.front());
        works_.pop_front();
      }
      work();
      work = nullptr;
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> works_;
  int64_t pushed_ = 0, done_ = 0;
  bool has_thread_ = false;
};

Queue& queue_of(int64_t stream) {
  static auto* queues = new std::array<Queue, kMaxStreams>;
  return queues->at(stream);
}

thread_local int64_t current_stream = 0;

Queue& current_queue() {
  return queue_of(current_stream);
}

// Waits without the GIL, which a function on the stream may need.
void wait_for(Queue& queue, int64_t ticket) {
  if (PyGILState_Check()) {
    py::gil_scoped_release no_gil;
    queue.wait(ticket);
  } else {
    queue.wait(ticket);
  }
}

struct Moment {
  int64_t stream = 0, ticket = 0;
};

Moment now_on(int64_t stream) {
  return {stream, queue_of(stream).pushed()};
}

void wait_on_stream(int64_t stream, Moment moment) {
  if (stream != moment.stream) {
    queue_of(stream).push([moment] { queue_of(moment.stream).wait(moment.ticket); });
  }
}

struct Block {
  void* memory;
  size_t size;
  int64_t stream;
  std::set<int64_t> recorded;
};

std::mutex free_mutex;
std::multimap<size_t, void*> free_memory;

void delete_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::vector<Moment> users;
  for (int64_t stream : block->recorded) {
    users.push_back(now_on(stream));
  }
  queue_of(block->stream).push([memory = block->memory, size = block->size, users] {
    for (const Moment& user : users) {
      queue_of(user.stream).wait(user.ticket);
    }
    std::memset(memory, 0xff, size);
    std::lock_guard<std::mutex> lock(free_mutex);
    free_memory.emplace(size, memory);
  });
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kType, 0);
    if (size == 0) {
      return {nullptr, device};
    }
    void* memory = nullptr;
    {
      std::lock_guard<std::mutex> lock(free_mutex);
      if (auto found = free_memory.find(size); found != free_memory.end()) {
        memory = found->second;
        free_memory.erase(found);
      }
    }
    if (memory == nullptr) {
      memory = std::malloc(size);
      std::memset(memory, 0xff, size);
    }
    auto* block = new Block{memory, size, current_stream, {}};
    return {memory, block, &delete_block, device};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator)

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(memory));
  if (after == pinned.begin()) {
    return false;
  }
  auto [begin, size] = *std::prev(after);
  return static_cast<const char*>(memory) < begin + size;
}

void delete_pinned(void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto found = pinned.find(static_cast<char*>(memory));
  std::memset(memory, 0xff, found->second);
  pinned.erase(found);
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) {
      return {nullptr, c10::DeviceType::CPU};
    }
    void* memory = std::aligned_alloc(64, (size + 63) / 64 * 64);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(memory)] = size;
    return {memory, memory, &delete_pinned, c10::DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

PinnedAllocator pinned_allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream stream(int64_t id) {
    return Stream(Stream::UNSAFE, c10::Device(kType, 0), id);
  }
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return {kType, 0};
  }
  c10::Device getDevice() const override {
    return {kType, 0};
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  Stream getStream(c10::Device) const override {
    return stream(current_stream);
  }
  Stream getDefaultStream(c10::Device) const override {
    return stream(0);
  }
  Stream getNewStream(c10::Device, int) const override {
    static std::atomic<int64_t> made{0};
    return stream(1 + made++ % (kMaxStreams - 1));
  }
  Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream given) const override {
    auto before = current_stream;
    current_stream = given.id();
    return stream(before);
  }
  void record(void** event, const Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Moment*>(*event);
    *event = new Moment(now_on(on.id()));
  }
  void block(void* event, const Stream& on) const override {
    if (event != nullptr) {
      wait_on_stream(on.id(), *static_cast<Moment*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    auto* moment = static_cast<Moment*>(event);
    return moment == nullptr || queue_of(moment->stream).is_done(moment->ticket);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  void synchronizeEvent(void* event) const override {
    count_wait("event");
    if (auto* moment = static_cast<Moment*>(event)) {
      wait_for(queue_of(moment->stream), moment->ticket);
    }
  }
  bool queryStream(const Stream& on) const override {
    auto moment = now_on(on.id());
    return queue_of(on.id()).is_done(moment.ticket);
  }
  void synchronizeStream(const Stream& on) const override {
    count_wait("stream");
    wait_for(queue_of(on.id()), now_on(on.id()).ticket);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    count_wait("device");
    for (int64_t id = 0; id < kMaxStreams; ++id) {
      wait_for(queue_of(id), now_on(id).ticket);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& on) const override {
    if (data.get_context() != nullptr) {
      auto* block = static_cast<Block*>(data.get_context());
      if (block->stream != on.id()) {
        block->recorded.insert(on.id());
      }
    }
  }
  DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override {
    return 0;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override {
    return 0;
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kType, 0};
  }
  bool isPinnedPtr(const void* memory) const override {
    return is_pinned(memory);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto grown = device_allocator.allocate(size);
    wait_for(current_queue(), now_on(current_stream).ticket);
    std::memcpy(grown.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(size);
  }
};

// The same memory as a tensor of the CPU.
at::Tensor alias_on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::DeviceType::CPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0) {
    return to;
  }
  const bool is_to_host = to.is_cpu(), is_from_host = from.is_cpu();
  const at::Tensor& host = is_to_host ? to : from;
  const bool crosses = is_to_host || is_from_host;
  at::Tensor source = alias_on_host(from), target = alias_on_host(to);
  const bool is_conj = from.is_conj() != to.is_conj(), is_neg = from.is_neg() != to.is_neg();
  c10::Storage held = crosses ? host.storage() : c10::Storage();
  const bool lags = crosses && !in_operator;
  current_queue().push([=]() mutable {
    if (lags) {
      std::this_thread::sleep_for(kLag);
    }
    at::NoGradGuard no_grad;
    auto values = is_conj ? source.conj() : source;
    target.copy_(is_neg ? values.neg() : values);
    held = c10::Storage();
  });
  if (crosses && !(non_blocking && is_pinned(host.data_ptr()))) {
    count_wait(is_to_host ? "copy to the host" : "copy from pageable memory");
    wait_for(current_queue(), now_on(current_stream).ticket);
  }
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  size_t needed = (self.numel() + self.storage_offset()) * self.element_size();
  if (self.storage().nbytes() < needed) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) {
    resize_(to, from.sizes(), std::nullopt);
  }
  return copy_from(from, to, false);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  stride.empty() && !size.empty() ? impl->set_sizes_contiguous(size) : impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, empty({0}, self.scalar_type(), {}, {}, {}, {}));
}

at::Scalar local_scalar(const at::Tensor& self) {
  count_wait("scalar");
  wait_for(current_queue(), now_on(current_stream).ticket);
  return alias_on_host(self).item();
}

void record_stream(at::Tensor& self, Stream on) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), on);
}

struct SilentHandler final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool before = in_operator;
  in_operator = true;
  SilentHandler silent;  // torch's fallback allocates results of no size, and torch warns that it enlarges them
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_operator = before;
    throw;
  }
  in_operator = before;
}

// copy_from() takes tensors whose conjugation or sign is still to be done.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("record_stream", &record_stream);
  library.impl("view", &at::native::view);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("unfold", &at::native::unfold);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.def("host_waits", [] {
    std::lock_guard<std::mutex> lock(waits_mutex);
    return std::exchange(waits, {});
  }, "Return what would have made the host wait since the last call.");
  module.def("alias_on_host", &alias_on_host, "Return a tensor of the CPU in the same memory.");
  module.def("enqueue", [](py::function call) {
    auto* held = new py::function(std::move(call));
    current_queue().push([held] {
      py::gil_scoped_acquire gil;
      try {
        (*held)();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("a function on a stream");
      }
      delete held;
    });
  }, "Call a function in the current stream.");
}
