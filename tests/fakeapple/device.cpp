// A GPU that lacks what Apple's lacks; the CPU computes for it. Its memory is the host's.
//
// Refused: float64, pinned memory, torch.bincount, BatchNorm's gradients of images that are channels
// last, and copies that do not wait, of memory that is free before the device is through with them,
// or to the host. What torch does there instead is wrong or slow.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <vector>

using at::IntArrayRef;
using at::Tensor;
using c10::OptionalIntArrayRef;
using std::optional;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    return {data, data, &std::free, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &std::free;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
};

Memory memory;
REGISTER_ALLOCATOR(KIND, &memory)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(false, "Apple's GPU: pinned memory");
  }
};

// Nothing is ever under way, so that events are nothing.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<KIND> {
  c10::Device exchangeDevice(c10::Device) const override {
    return DEVICE;
  }
  c10::Device getDevice() const override {
    return DEVICE;
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  void record(
      void**,
      const c10::Stream&,
      const c10::DeviceIndex,
      const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

namespace {

c10::ScalarType checked(optional<c10::ScalarType> dtype) {
  c10::ScalarType found = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(
      found != at::kDouble, "Cannot convert a MPS Tensor to float64 dtype");
  return found;
}

Tensor empty(
    IntArrayRef size,
    optional<c10::ScalarType> dtype,
    optional<c10::Layout>,
    optional<c10::Device>,
    optional<bool>,
    optional<c10::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, checked(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    optional<c10::ScalarType> dtype,
    optional<c10::Layout>,
    optional<c10::Device>,
    optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      size, stride, &memory, keys, checked(dtype));
}

// The same memory as a tensor of the CPU
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor on_device(const Tensor& tensor) {
  return tensor.defined() ? tensor.to(DEVICE) : tensor;
}

// What copies that have not been waited for read
std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> under_way;
std::mutex lock;

void synchronize() {
  const std::lock_guard<std::mutex> guard(lock);
  const auto read = std::move(under_way);
  under_way.clear();
  for (const auto& memory : read) {
    TORCH_CHECK(
        !memory.expired(), "Apple's GPU: a copy has read memory that was free");
  }
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool async) {
  if (target.is_cpu()) {
    TORCH_CHECK(!async, "Apple's GPU: a copy that does not wait");
    synchronize();
  } else if (source.is_cpu() && async) {
    const std::lock_guard<std::mutex> guard(lock);
    under_way.push_back(source.storage().getWeakStorageImpl());
  }
  Tensor to = on_host(target);
  to.copy_(on_host(source));
  return target;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  return at::native::set_(self, std::move(source));
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  synchronize();
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const optional<Tensor>& bias,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  optional<Tensor> on_cpu;
  if (bias && bias->defined()) {
    on_cpu = on_host(*bias);
  }
  return on_device(at::convolution(
      on_host(input),
      on_host(weight),
      on_cpu,
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& slope,
    const Tensor& input,
    const Tensor& weight,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  const std::array<int64_t, 1> bias{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  const auto found = at::convolution_backward(
      on_host(slope),
      on_host(input),
      on_host(weight),
      OptionalIntArrayRef(bias),
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups,
      mask);
  return {
      on_device(std::get<0>(found)),
      on_device(std::get<1>(found)),
      on_device(std::get<2>(found))};
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

// cpu_fallback does not know that it changes the running statistics.
void norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (auto& value : *stack) {
    if (value.isTensor()) {
      value = on_host(value.toTensor());
    }
  }
  op.callBoxed(stack);
  for (auto& value : *stack) {
    value = on_device(value.toTensor());
  }
}

void norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const Tensor input = torch::jit::peek(*stack, 1, count).toTensor();
  TORCH_CHECK(
      input.is_contiguous(), "Apple's GPU: BatchNorm of channels last");
  by_cpu(op, stack);
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, "Apple's GPU: ", op.schema().name());
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl(
      "native_batch_norm",
      torch::CppFunction::makeFromBoxedFunction<&norm>());
  m.impl(
      "native_batch_norm_backward",
      torch::CppFunction::makeFromBoxedFunction<&norm_backward>());
  m.impl("bincount", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}
