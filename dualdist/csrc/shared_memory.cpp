// Collectives between processes that share memory: short messages, and tensors in chunks that stay in cache.
//
// Note [steps]: each rank has two slots, which it fills in turn, one for each chunk. A chunk takes one step: every rank
// fills its slot, arrives, waits until all have arrived, and reads the slots of all. Where more than two ranks reduce,
// it takes two: after the first, each rank reduces its part of the chunk into its slot, and after the second it reads
// the others' parts. A rank that fills a slot again has seen all ranks arrive at a step of the chunk in between, and
// they had read that slot before.
//
// Note [slices]: between hosts each rank of a host carries one slice of a tensor over the network. reduce_scatter gives
// each rank the host's sum of its slice: a slot is cut into one part for each rank, and each rank adds up the parts that
// are its own. share copies every rank's slice to all ranks.
//
// Note [arrivals]: all ranks add 1 to one counter. No rank begins a step before all have arrived at the last one, so
// step s is complete exactly when the counter has reached s times the number of ranks. The last rank wakes those that
// sleep. The addition releases what a rank wrote to its slot, and the load acquires it.
//
// A wait ends after a while, or when a signal came, so that Python can handle signals, time-outs and lost ranks.
#include <ATen/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "arithmetic.h"
#include "modules.h"

namespace py = pybind11;

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
static_assert(std::atomic<uint32_t>::is_always_lock_free, "a lock would be another one in each process");

constexpr int64_t kCacheLine = 64;
// Up to this size, and for two ranks at almost any size, every rank reduces all values itself, in one step.
constexpr int64_t kOneStepBytes = 1 << 14;
// Numbers of 16 bits take longer to add than to copy: two ranks share the work from this size on.
constexpr int64_t kShared16Bytes = 1 << 16;
constexpr int kPollsPerClock = 32;
// After spinning a rank lets others run on its core between polls for so long before it sleeps: a core that sleeps takes
// as long to wake. It spins only for as long as ranks in step are apart, as the rank that it waits for may have been moved
// to the same core, where other programs use the rest.
constexpr auto kYielding = std::chrono::microseconds(200);

struct alignas(kCacheLine) Arrivals {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> sleepers;
};

struct alignas(kCacheLine) MessageHeader {
  uint32_t text_bytes;
  uint32_t payload_bytes;  // follows the header, aligned; the text follows it
};

// Counters may wrap around.
bool reached(uint32_t count, uint32_t target) { return static_cast<int32_t>(count - target) >= 0; }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

class ShmChannel {
 public:
  ShmChannel(const py::buffer& memory, int index, int size, int64_t slot_bytes, double spin_s)
      : memory_(memory.request(/*writable=*/true)), index_(index), size_(size), slot_bytes_(slot_bytes),
        spin_(std::chrono::duration_cast<Clock::duration>(Seconds(spin_s))) {
    if (memory_.size * memory_.itemsize < needed_bytes(size, slot_bytes)) throw py::value_error("too little memory");
    char* base = static_cast<char*>(memory_.ptr);
    arrivals_ = reinterpret_cast<Arrivals*>(base);
    slots_ = base + kCacheLine;
  }

  static int64_t needed_bytes(int size, int64_t slot_bytes) { return kCacheLine + 2 * size * slot_bytes; }

  void begin_message(const std::string& text, const std::optional<at::Tensor>& payload) {
    const size_t payload_bytes = payload ? payload->nbytes() : 0;
    if (sizeof(MessageHeader) + payload_bytes + text.size() > static_cast<size_t>(slot_bytes_)) {
      throw py::value_error("the message is too long");
    }
    begin(Task{});
    char* slot = next_slot();
    new (slot) MessageHeader{static_cast<uint32_t>(text.size()), static_cast<uint32_t>(payload_bytes)};
    if (payload) std::memcpy(slot + sizeof(MessageHeader), payload->data_ptr(), payload_bytes);
    std::memcpy(slot + sizeof(MessageHeader) + payload_bytes, text.data(), text.size());
    arrive();
    task_.steps_taken = 1;
  }

  // The texts of all ranks, after a message.
  std::vector<py::bytes> texts() const {
    std::vector<py::bytes> all;
    for (int rank = 0; rank < size_; ++rank) all.emplace_back(text_of(rank).data(), text_of(rank).size());
    return all;
  }

  bool are_texts_equal() const {
    for (int rank = 0; rank < size_; ++rank) {
      if (header_of(rank).payload_bytes != header_of(index_).payload_bytes || text_of(rank) != text_of(index_)) return false;
    }
    return true;
  }

  // Reduces the payloads of all ranks, after messages whose texts are equal.
  at::Tensor reduce_payloads(at::Tensor tensor, int op, bool in_place) const {
    at::Tensor result = in_place ? tensor : at::empty_like(tensor);
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const auto out = static_cast<char*>(result.data_ptr());
    reduce_slots(static_cast<Op>(op), out, sizeof(MessageHeader), result.nbytes(), result.scalar_type(), nullptr);
    if (in_place) mark_changed(result);
    return result;
  }

  // Reduces a contiguous tensor into another, or itself.
  void begin_allreduce(const at::Tensor& tensor, const at::Tensor& output, int op) {
    Task task{Task::reduce, tensor, output};
    task.op = static_cast<Op>(op);
    const bool has_16_bits = task.dtype == at::kBFloat16 || task.dtype == at::kHalf;
    task.has_two_steps = size_ > 2 ? task.nbytes > kOneStepBytes : has_16_bits && size_ == 2 && task.nbytes > kShared16Bytes;
    begin(std::move(task));
  }

  // Copies a contiguous tensor of every rank into (size, *s).
  void begin_allgather(const at::Tensor& tensor, const at::Tensor& output) {
    begin(Task{Task::gather, tensor, output});
  }

  void begin_broadcast(const at::Tensor& tensor, int root) {
    Task task{Task::broadcast, tensor, tensor};
    task.root = root;
    begin(std::move(task));
  }

  // Reduces bytes [starts[i], starts[i + 1]) of a contiguous tensor on rank i, in place; the rest is undefined afterwards.
  void begin_reduce_scatter(const at::Tensor& tensor, std::vector<int64_t> starts, int op) {
    Task task{Task::reduce_scatter, tensor, tensor};
    task.op = static_cast<Op>(op);
    task.set_slices(std::move(starts), size_);
    begin(std::move(task));
  }

  // Copies bytes [starts[i], starts[i + 1]) of a contiguous tensor from rank i to all ranks.
  void begin_share(const at::Tensor& tensor, std::vector<int64_t> starts) {
    Task task{Task::share, tensor, tensor};
    task.set_slices(std::move(starts), size_);
    begin(std::move(task));
  }

  // Goes on with what was begun for at most `wait_s`; returns true when it is done.
  bool advance(double wait_s) {
    const py::gil_scoped_release no_gil;
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(wait_s));
    while (!task_.is_done()) {
      if (task_.steps_taken == 0) {
        fill();
      } else if (!wait_for_all(deadline)) {
        return false;
      } else if (task_.has_two_steps && task_.steps_taken == 1) {
        reduce_part();
      } else {
        read();
        task_.position += chunk_bytes();
        task_.steps_taken = 0;
        continue;
      }
      arrive();
      ++task_.steps_taken;
    }
    task_.release();
    return true;
  }

  uint32_t steps() const { return step_; }

 private:
  struct Task {
    enum Kind { message, reduce, gather, broadcast, reduce_scatter, share };

    Task() = default;
    Task(Kind kind, at::Tensor input, at::Tensor output)
        : kind(kind), input(std::move(input)), output(std::move(output)), nbytes(this->input.nbytes()),
          dtype(this->input.scalar_type()), source(static_cast<char*>(this->input.data_ptr())),
          target(static_cast<char*>(this->output.data_ptr())) {}

    Kind kind = message;
    at::Tensor input, output;
    int64_t nbytes = 1;  // of a message: one chunk, whatever its length; of slices: those of the longest
    at::ScalarType dtype = at::kByte;
    char* source = nullptr;
    char* target = nullptr;
    Op op = Op::sum;
    int root = 0;
    std::vector<int64_t> starts;  // of the slices, and the end of the last one
    bool has_two_steps = false;
    int64_t position = 0;
    int steps_taken = 0;  // for this chunk

    bool is_done() const { return position >= nbytes; }
    void set_slices(std::vector<int64_t> given, int size) {
      if (given.size() != static_cast<size_t>(size) + 1 || given.front() < 0 || given.back() > nbytes ||
          !std::is_sorted(given.begin(), given.end())) {
        throw py::value_error("the slices do not fit the tensor");
      }
      starts = std::move(given);
      nbytes = 0;
      for (int rank = 0; rank < size; ++rank) nbytes = std::max(nbytes, starts[rank + 1] - starts[rank]);
    }
    void release() {
      if (output.defined()) mark_changed(output);
      input.reset();
      output.reset();
    }
  };

  char* slot(int rank) const { return slots_ + (2 * rank + turn_) * slot_bytes_; }

  char* next_slot() {
    turn_ ^= 1;
    return slot(index_);
  }

  const MessageHeader& header_of(int rank) const { return *reinterpret_cast<const MessageHeader*>(slot(rank)); }

  std::string_view text_of(int rank) const {
    const auto& header = header_of(rank);
    return {slot(rank) + sizeof header + header.payload_bytes, header.text_bytes};
  }

  static void mark_changed(const at::Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }

  void begin(Task task) {
    if (!task_.is_done()) throw std::logic_error("the last operation is not done");
    task_ = std::move(task);
  }

  // Of a slot, for each rank, in reduce_scatter.
  int64_t part_bytes() const { return slot_bytes_ / size_ / kCacheLine * kCacheLine; }

  int64_t chunk_bytes() const {
    const int64_t most = task_.kind == Task::reduce_scatter ? part_bytes() : slot_bytes_;
    return std::min(most, task_.nbytes - task_.position);
  }

  // The part of a rank's slice in this chunk.
  int64_t slice_start(int rank) const { return std::min(task_.starts[rank] + task_.position, task_.starts[rank + 1]); }
  int64_t slice_bytes(int rank) const { return std::min(chunk_bytes(), task_.starts[rank + 1] - slice_start(rank)); }

  // The start of a rank's part of the chunk, which is on a cache line for every dtype.
  int64_t part_start(int rank) const {
    const int64_t nbytes = chunk_bytes(), lines = (nbytes + kCacheLine - 1) / kCacheLine;
    return std::min(nbytes, (lines * rank / size_) * kCacheLine);
  }

  void fill() {
    char* own = next_slot();
    if (task_.kind == Task::reduce_scatter) {
      for (int rank = 0; rank < size_; ++rank) {
        if (rank != index_) std::memcpy(own + rank * part_bytes(), task_.source + slice_start(rank), slice_bytes(rank));
      }
    } else if (task_.kind == Task::share) {
      std::memcpy(own, task_.source + slice_start(index_), slice_bytes(index_));
    } else if (task_.kind != Task::broadcast || index_ == task_.root) {
      std::memcpy(own, task_.source + task_.position, chunk_bytes());
    }
  }

  // `own` is a copy of this rank's values that may still be in the cache, and may be where the result goes.
  void reduce_slots(Op op, char* out, int64_t start, int64_t nbytes, at::ScalarType dtype, const char* own) const {
    Parts parts;
    for (int rank = 0; rank < size_; ++rank) {
      parts.push_back(rank == index_ && rank < 2 && own ? own : slot(rank) + start);
    }
    reduce(op, out, parts, nbytes, dtype);
  }

  // Reduces bytes [start, end) of the chunk into the result.
  void reduce_range(int64_t start, int64_t end) {
    const int64_t first = task_.position + start;
    reduce_slots(task_.op, task_.target + first, start, end - start, task_.dtype, task_.source + first);
  }

  void reduce_part() {
    const int64_t start = part_start(index_), end = part_start(index_ + 1);
    reduce_range(start, end);
    std::memcpy(slot(index_) + start, task_.target + task_.position + start, end - start);
  }

  // Reduces this rank's slice in rank order. Its own values are where the result goes: with more than two ranks they are
  // copied first, unless they are the first to be added.
  void reduce_slice() {
    const int64_t nbytes = slice_bytes(index_);
    char* out = task_.target + slice_start(index_);
    if (nbytes == 0) return;
    const char* own = out;
    if (size_ > 2 && index_ > 1) {
      char* copy = slot(index_) + index_ * part_bytes();  // which no other rank reads
      std::memcpy(copy, out, nbytes);
      own = copy;
    }
    Parts parts;
    for (int rank = 0; rank < size_; ++rank) parts.push_back(rank == index_ ? own : slot(rank) + index_ * part_bytes());
    reduce(task_.op, out, parts, nbytes, task_.dtype);
  }

  void read() {
    const int64_t nbytes = chunk_bytes();
    char* out = task_.target + task_.position;
    if (task_.kind == Task::reduce_scatter) return reduce_slice();
    if (task_.kind == Task::reduce && !task_.has_two_steps) reduce_range(0, nbytes);
    for (int rank = 0; rank < size_; ++rank) {
      if (task_.kind == Task::share) {
        if (rank != index_) std::memcpy(task_.target + slice_start(rank), slot(rank), slice_bytes(rank));
        continue;
      }
      const int64_t start = part_start(rank);
      if (task_.kind == Task::reduce && task_.has_two_steps && rank != index_) {
        std::memcpy(out + start, slot(rank) + start, part_start(rank + 1) - start);
      } else if (task_.kind == Task::gather) {
        std::memcpy(out + rank * task_.nbytes, slot(rank), nbytes);
      } else if (task_.kind == Task::broadcast && rank == task_.root && rank != index_) {
        std::memcpy(out, slot(rank), nbytes);
      }
    }
  }

  void arrive() {
    ++step_;
    const uint32_t count = arrivals_->count.fetch_add(1) + 1;
    if (count == step_ * size_ && arrivals_->sleepers.load() > 0) {
      futex(arrivals_->count, FUTEX_WAKE, INT_MAX, nullptr);
    }
  }

  bool has_step_ended() const { return reached(arrivals_->count.load(), step_ * size_); }

  // Returns false if some ranks have not arrived at the deadline, or when a signal came.
  bool wait_for_all(Clock::time_point deadline) {
    if (has_step_ended()) return true;
    if (Clock::now() >= deadline) return false;
    for (const auto end = Clock::now() + spin_; Clock::now() < end;) {
      for (int poll = 0; poll < kPollsPerClock; ++poll) {
        relax();
        if (has_step_ended()) return true;
      }
    }
    for (const auto end = Clock::now() + kYielding; Clock::now() < end;) {
      sched_yield();
      if (has_step_ended()) return true;
    }
    bool was_interrupted = false;
    while (!was_interrupted) {
      const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
      if (left <= 0) break;
      const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
      arrivals_->sleepers.fetch_add(1);
      const uint32_t count = arrivals_->count.load();
      const bool has_ended = reached(count, step_ * size_);
      if (!has_ended) was_interrupted = futex(arrivals_->count, FUTEX_WAIT, count, &timeout) == -1 && errno == EINTR;
      arrivals_->sleepers.fetch_sub(1);
      if (has_ended) return true;
    }
    return has_step_ended();
  }

  py::buffer_info memory_;  // keeps the mapping
  Arrivals* arrivals_;
  char* slots_;
  const int index_, size_;
  const int64_t slot_bytes_;
  const Clock::duration spin_;
  uint32_t step_ = 0;
  int turn_ = 0;
  Task task_ = finished();

  static Task finished() {
    Task task;
    task.nbytes = 0;
    return task;
  }
};

}  // namespace

void bind_shared_memory(py::module_& module) {
  py::class_<ShmChannel>(module, "ShmChannel")
      .def(py::init<const py::buffer&, int, int, int64_t, double>())
      .def_property_readonly("steps", &ShmChannel::steps)
      .def("begin_message", &ShmChannel::begin_message)
      .def("texts", &ShmChannel::texts)
      .def("are_texts_equal", &ShmChannel::are_texts_equal)
      .def("reduce_payloads", &ShmChannel::reduce_payloads)
      .def("begin_allreduce", &ShmChannel::begin_allreduce)
      .def("begin_allgather", &ShmChannel::begin_allgather)
      .def("begin_broadcast", &ShmChannel::begin_broadcast)
      .def("begin_reduce_scatter", &ShmChannel::begin_reduce_scatter)
      .def("begin_share", &ShmChannel::begin_share)
      .def("advance", &ShmChannel::advance);
}
