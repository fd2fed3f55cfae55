// Pack gradients into buckets while autograd computes them, and make the reduced values the parameters' gradients.
//
// A post hook of each parameter's AccumulateGrad node, which runs after all hooks of the parameter, copies the gradient to
// its place in a bucket and counts it. Python is called once per backward (Reducer.begin_backward), and once per full
// bucket (Reducer.on_bucket_ready); nothing runs in Python per parameter. dualdist/ddp/packer.py is the same in
// Python.
//
// Note [locks]: autograd runs the nodes of each device in a thread of its own, without the GIL. Nothing waits for a
// packer's mutex while it holds the GIL, so that what runs under the mutex may take the GIL.
//
// Note [ownership]: a reducer owns its packer, a packer the nodes and with them the parameters, and a node its hook. The
// hook refers to the packer weakly: with the optimizer goes its reducer, and the hook, if it is left, does nothing.
#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "modules.h"

namespace {

namespace py = pybind11;
using torch::autograd::variable_list;
// A shared_ptr before torch 2.13, an intrusive_ptr since.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// Up to this size one thread copies faster.
constexpr size_t kMaxPlainCopyBytes = 1 << 20;

class GradientPacker;

class Hook : public torch::autograd::FunctionPostHook {
 public:
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override;

  // Compiled autograd would drop the hook silently.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "compiled autograd does not run the C++ hooks of dd.wrap_optimizer: set DUALDIST_NO_EXTENSION=1");
  }

  void assign(const std::shared_ptr<GradientPacker>& packer, int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    packer_ = packer;
    number_ = number;
  }

  std::pair<std::shared_ptr<GradientPacker>, int64_t> target() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {packer_.lock(), number_};
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<GradientPacker> packer_;
  int64_t number_ = -1;
};

Hook* find_hook(const NodePtr& node) {
  for (const auto& hook : node->post_hooks()) {
    if (auto* ours = dynamic_cast<Hook*>(hook.get())) {
      return ours;
    }
  }
  return nullptr;
}

bool is_dense(const at::Tensor& grad) {
  return grad.defined() && grad.layout() == at::kStrided;
}

// True if both tensors are the same elements in memory.
bool is_same_memory(const at::Tensor& grad, const at::Tensor& view) {
  return grad.data_ptr() == view.data_ptr() && grad.sizes() == view.sizes() && grad.strides() == view.strides();
}

// True if one loop over the memory of these small tensors copies their values.
bool is_plain_copy(const at::Tensor& to, const at::Tensor& from) {
  return from.device().is_cpu() && to.device().is_cpu() && to.scalar_type() == from.scalar_type() &&
      to.nbytes() <= kMaxPlainCopyBytes && to.sizes() == from.sizes() && to.strides() == from.strides() &&
      from.is_non_overlapping_and_dense() && !from.is_conj() && !from.is_neg() && !to.is_conj() && !to.is_neg();
}

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  if (is_plain_copy(to, from)) {
    std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
  } else {
    at::NoGradGuard no_grad;
    to.copy_(from, /*non_blocking=*/true);
  }
}

// Copy the values times `scale`.
void copy_scaled(const at::Tensor& to, const at::Tensor& from, double scale) {
  if (scale == 1.0) {
    copy_values(to, from);
  } else if (to.scalar_type() == at::kFloat && is_plain_copy(to, from)) {
    const auto* source = static_cast<const float*>(from.data_ptr());
    auto* target = static_cast<float*>(to.data_ptr());
    const auto factor = static_cast<float>(scale);
    for (int64_t i = 0, count = to.numel(); i < count; ++i) {
      target[i] = source[i] * factor;
    }
  } else {
    at::NoGradGuard no_grad;
    at::Tensor result = to;
    at::mul_out(result, from, at::scalar_tensor(scale, to.scalar_type()));  // a number, on the CPU for any device
  }
}

struct Member {
  at::Tensor param;  // undefined if another reducer has taken it
  NodePtr node;
  Hook* hook = nullptr;  // owned by the node
  int64_t bucket = -1;
  at::Tensor view;  // its place in the bucket; undefined if it is reduced separately
  bool is_ready = false;
  bool is_packed = false;
  bool is_in_place = false;  // packed without a copy
};

struct Bucket {
  std::vector<int64_t> members;
  double scale = 1.0;  // of the values that are sent
  int64_t pending = 0;
  std::vector<c10::Stream> streams;  // that wrote to the bucket
};

class GradientPacker : public std::enable_shared_from_this<GradientPacker> {
 public:
  explicit GradientPacker(const py::object& reducer) : reducer_(py::weakref(reducer)) {}

  ~GradientPacker() {
    py::gil_scoped_acquire gil;
    py::weakref(std::move(reducer_));
  }

  // The reducer; None if it was deleted.
  py::object reducer() const {
    return reducer_();
  }

  // Reduce the gradients of a parameter from now on, in place of any other packer.
  void watch(const at::Tensor& param, int64_t number) {
    auto node = torch::autograd::impl::grad_accumulator(param);
    Hook* hook = find_hook(node);
    if (hook == nullptr) {
      auto created = std::make_unique<Hook>();
      hook = created.get();
      node->add_post_hook(std::move(created));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    members_.resize(std::max<size_t>(members_.size(), number + 1));
    members_[number] = Member{param, node, hook};
    hook->assign(shared_from_this(), number);
  }

  // Leave a parameter to the packer that has taken it.
  void forget(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    Member& member = members_.at(number);
    if (member.param.defined() && member.bucket >= 0 && !member.is_ready) {
      --buckets_.at(member.bucket).pending;
    }
    if (member.hook != nullptr && member.hook->target().first.get() == this) {
      member.hook->assign(nullptr, -1);
    }
    member.param.reset();
    member.node = NodePtr();
    member.hook = nullptr;
  }

  // Stop watching all parameters.
  void detach() {
    std::vector<Member> members;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      members.swap(members_);
      buckets_.clear();
      open_.clear();
      order_.clear();
    }
    for (auto& member : members) {
      if (member.hook != nullptr && member.hook->target().first.get() == this) {
        member.hook->assign(nullptr, -1);
      }
    }
  }

  // Set the members of a bucket, the views of its memory that their gradients are copied to, and the factor that the
  // copies are multiplied by.
  void set_bucket(
      size_t index, const std::vector<int64_t>& members, const std::vector<std::optional<at::Tensor>>& views, double scale) {
    std::lock_guard<std::mutex> lock(mutex_);
    buckets_.resize(std::max(buckets_.size(), index + 1));
    Bucket& bucket = buckets_[index];
    bucket.members = members;
    bucket.scale = scale;
    for (size_t i = 0; i < members.size(); ++i) {
      Member& member = members_.at(members[i]);
      member.bucket = static_cast<int64_t>(index);
      member.view = views.at(i).value_or(at::Tensor());
    }
    reset(bucket);
  }

  void clear_buckets() {
    std::lock_guard<std::mutex> lock(mutex_);
    buckets_.clear();
    for (Member& member : members_) {
      member.bucket = -1;
      member.view.reset();
    }
  }

  // Forget which gradients are ready.
  void reset_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    order_.clear();
    for (Bucket& bucket : buckets_) {
      reset(bucket);
    }
  }

  void open(int64_t backward) {
    std::lock_guard<std::mutex> lock(mutex_);
    open_.insert(backward);
  }

  bool is_open(int64_t backward) {
    std::lock_guard<std::mutex> lock(mutex_);
    return open_.count(backward) != 0;
  }

  void close_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_.clear();
  }

  int64_t pending(size_t index) {
    std::lock_guard<std::mutex> lock(mutex_);
    return buckets_.at(index).pending;
  }

  // The parameters whose gradients are ready, in that order.
  std::vector<int64_t> order() {
    std::lock_guard<std::mutex> lock(mutex_);
    return order_;
  }

  // Pack the gradients that no hook has packed, zeros for missing and sparse ones, and let the current stream wait for
  // those that packed the others. Returns true if every member has a dense gradient.
  bool pack_rest(size_t index) {
    std::lock_guard<std::mutex> lock(mutex_);
    at::NoGradGuard no_grad;
    Bucket& bucket = buckets_.at(index);
    bool all_dense = true;
    for (int64_t number : bucket.members) {
      Member& member = members_.at(number);
      if (!member.is_packed && !pack(member, bucket)) {
        all_dense = false;
        if (member.view.defined()) {
          member.view.zero_();
        }
      }
      if (member.is_in_place && bucket.scale != 1.0) {
        member.view.mul_(bucket.scale);
      }
    }
    wait_for_streams(bucket);
    return all_dense;
  }

  // Make the bucket's values the gradients of its members: as views, or copied.
  void assign_grads(size_t index, bool as_views) {
    std::vector<at::Tensor> replaced;  // freed after the lock, as this may take the GIL
    std::lock_guard<std::mutex> lock(mutex_);
    at::NoGradGuard no_grad;
    for (int64_t number : buckets_.at(index).members) {
      Member& member = members_.at(number);
      if (!member.param.defined() || !member.view.defined()) {
        continue;
      }
      at::Tensor& grad = member.param.mutable_grad();
      if (is_dense(grad) && is_same_memory(grad, member.view)) {
        continue;
      }
      if (as_views) {
        replaced.push_back(grad);
        grad = member.view.variable_data();  // another tensor in the same memory, so that the program never gets ours
      } else if (is_dense(grad) && !grad.requires_grad()) {
        copy_values(grad, member.view);
      } else {
        replaced.push_back(grad);
        grad = member.view.clone();
      }
    }
  }

  void on_accumulated(Hook& hook);

  std::atomic<bool> is_suspended{false};
  std::atomic<bool> packs{false};  // the backward is followed by a reduction
  std::atomic<bool> launches_early{false};  // call on_bucket_ready before backward ends

 private:
  void reset(Bucket& bucket) {
    bucket.pending = 0;
    bucket.streams.clear();
    for (int64_t number : bucket.members) {
      Member& member = members_.at(number);
      member.is_ready = member.is_packed = member.is_in_place = false;
      bucket.pending += member.param.defined();
    }
  }

  // Copy a gradient to its place in the bucket, unless it is there. Returns false if it is missing or not dense.
  bool pack(Member& member, Bucket& bucket) {
    if (!member.param.defined()) {
      return false;
    }
    const at::Tensor& grad = member.param.grad();
    if (grad.defined() && !grad.device().is_cpu()) {
      note_stream(bucket, grad.device());  // also of a gradient that the bucket's launch reads
    }
    if (!member.view.defined() || !is_dense(grad)) {
      return false;
    }
    member.is_in_place = is_same_memory(grad, member.view);
    if (!member.is_in_place) {
      copy_scaled(member.view, grad, bucket.scale);
    }
    return member.is_packed = true;
  }

  static void note_stream(Bucket& bucket, c10::Device device) {
    const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    for (const auto& known : bucket.streams) {
      if (known == stream) {
        return;
      }
    }
    bucket.streams.push_back(stream);
  }

  static void wait_for_streams(const Bucket& bucket) {
    for (const auto& stream : bucket.streams) {
      const auto current = c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device());
      if (stream != current) {
        c10::Event event(stream.device_type());
        event.record(stream);
        event.block(current);
      }
    }
  }

  template <typename... Args>
  void call(const char* method, Args... args) {
    py::gil_scoped_acquire gil;
    try {
      py::object reducer = reducer_();
      if (!reducer.is_none()) {
        reducer.attr(method)(args...);
      }
    } catch (py::error_already_set& error) {
      error.restore();
      python_error persisted;  // which autograd hands to the caller of backward()
      persisted.persist();
      throw persisted;
    }
  }

  py::weakref reducer_;
  std::mutex mutex_;
  std::vector<Member> members_;
  std::vector<Bucket> buckets_;
  std::set<int64_t> open_;  // autograd's ids of the backwards that have begun and not ended
  std::vector<int64_t> order_;
};

void GradientPacker::on_accumulated(Hook& hook) {
  if (is_suspended) {
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t backward = torch::autograd::get_current_graph_task_id();
  if (open_.count(backward) == 0) {
    lock.unlock();
    call("begin_backward", backward);
    lock.lock();
  }
  const auto [packer, number] = hook.target();  // begin_backward may have registered the parameters anew
  if (!packs || packer.get() != this) {
    return;
  }
  Member& member = members_.at(number);
  if (!member.param.defined() || member.is_ready || member.bucket < 0) {
    return;
  }
  if (is_dense(member.param.grad()) && member.view.defined() &&
      (member.param.grad().scalar_type() != member.view.scalar_type() ||
       member.param.grad().device() != member.view.device())) {
    lock.unlock();
    call("refuse_gradient", number);
    return;
  }
  Bucket& bucket = buckets_.at(member.bucket);
  pack(member, bucket);
  member.is_ready = true;
  order_.push_back(number);
  if (--bucket.pending == 0 && launches_early) {
    lock.unlock();
    call("on_bucket_ready");
  }
}

variable_list Hook::operator()(const variable_list& outputs, const variable_list& /*inputs*/) {
  if (const auto packer = target().first) {
    packer->on_accumulated(*this);
  }
  return outputs;
}

// The reducer of a parameter's gradients; None if there is none.
py::object owner_of(const at::Tensor& param) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(param);
  Hook* hook = node ? find_hook(node) : nullptr;
  const auto packer = hook == nullptr ? nullptr : hook->target().first;
  return packer == nullptr ? py::none() : packer->reducer();
}

}  // namespace

void bind_gradients(py::module_& module) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  module.def("owner_of", &owner_of);
  py::class_<GradientPacker, std::shared_ptr<GradientPacker>>(module, "GradientPacker")
      .def(py::init<const py::object&>())
      .def_property(
          "is_suspended", [](GradientPacker& p) { return p.is_suspended.load(); },
          [](GradientPacker& p, bool value) { p.is_suspended = value; })
      .def_property(
          "packs", [](GradientPacker& p) { return p.packs.load(); },
          [](GradientPacker& p, bool value) { p.packs = value; })
      .def_property(
          "launches_early", [](GradientPacker& p) { return p.launches_early.load(); },
          [](GradientPacker& p, bool value) { p.launches_early = value; })
      .def("watch", &GradientPacker::watch, no_gil())
      .def("forget", &GradientPacker::forget, no_gil())
      .def("detach", &GradientPacker::detach, no_gil())
      .def("set_bucket", &GradientPacker::set_bucket, no_gil())
      .def("clear_buckets", &GradientPacker::clear_buckets, no_gil())
      .def("reset", &GradientPacker::reset_all, no_gil())
      .def("open", &GradientPacker::open, no_gil())
      .def("is_open", &GradientPacker::is_open, no_gil())
      .def("close_all", &GradientPacker::close_all, no_gil())
      .def("pending", &GradientPacker::pending, no_gil())
      .def("order", &GradientPacker::order, no_gil())
      .def("pack_rest", &GradientPacker::pack_rest, no_gil())
      .def("assign_grads", &GradientPacker::assign_grads, no_gil());
}
