// The kernels of mm and bmm that note their calls for ops.Recorder: a Python module, built by
// noting.py. Between a job's own kernels Python's code is cold in the caches, and noting a call in
// it costs tens of microseconds; here Python is asked only in which module a forward call runs.
#include <Python.h>

#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

constexpr int64_t MOST_DIMS = 3;

struct Operand {
  int64_t dims;
  std::array<int64_t, MOST_DIMS> sizes, strides;
  at::ScalarType type;
  int64_t storage; // which one, not where its data is

  explicit Operand(const at::Tensor& t)
      : dims(t.dim()),
        sizes(),
        strides(),
        type(t.scalar_type()),
        storage(reinterpret_cast<int64_t>(t.storage().unsafeGetStorageImpl())) {
    for (int64_t i = 0; i < dims; i++) {
      sizes.at(i) = t.sizes()[i];
      strides.at(i) = t.strides()[i];
    }
  }
};

struct Note { // the fields of ops.Noted
  const char* op;
  Operand x, w;
  double seconds;
  bool forward, backward, tracked;
  int64_t step, node, module;
  const std::string* caller;
};

struct State {
  std::mutex lock;
  std::deque<Note> notes;
  uint64_t count = 0, failed = 0; // calls so far
  int64_t step = 0;
  std::unordered_set<const void*> leaves; // modules without modules in them
  std::unordered_map<std::type_index, std::string> nodes; // the names of node classes
  std::unordered_set<std::string> named; // those of autograd.Functions, which share a class
};

State* state = nullptr; // never freed: a thread may be in a kernel when the recording ends
std::vector<std::pair<std::string, c10::RegistrationHandleRAII>> registered;
// Python's: threads that handle a GEMM already, recomputations under way, whether this is one,
// the code of Module._call_impl, and the module of a call that is not a leaf's.
PyObject *inside, *tasks, *recomputing, *call_impl, *module_of;

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  Gil() = default;
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  ~Gil() {
    PyGILState_Release(state);
  }
};

struct Owned { // a reference; null after an error
  PyObject* object;
  explicit Owned(PyObject* o) : object(o) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    Py_XDECREF(object);
  }
};

struct Failed {}; // a Python error is set

PyObject* checked(PyObject* object) {
  if (object == nullptr) {
    throw Failed();
  }
  return object;
}

// The sizes of `inside` and `tasks` are read without the GIL: nearly always both are empty, and what
// another thread does to them meanwhile is not this one's.
bool nested() {
  if (PySet_GET_SIZE(inside) == 0) {
    return false;
  }
  const Gil gil;
  const Owned thread(checked(PyLong_FromUnsignedLong(PyThread_get_thread_ident())));
  return PySet_Contains(inside, thread.object) == 1;
}

bool repeated() {
  if (PyDict_GET_SIZE(tasks) == 0) {
    return false;
  }
  const Gil gil;
  const Owned answer(checked(PyObject_CallObject(recomputing, nullptr)));
  return answer.object == Py_True;
}

// The module whose Module._call_impl is the innermost on this thread's Python stack, or null.
PyObject* running() {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    const bool found = reinterpret_cast<PyObject*>(code) == call_impl;
    Py_DECREF(code);
    if (found) {
      break;
    }
    PyFrameObject* const back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  if (frame == nullptr) {
    return nullptr;
  }
  const Owned owned(reinterpret_cast<PyObject*>(frame));
#if PY_VERSION_HEX >= 0x030C0000
  return checked(PyFrame_GetVarString(frame, "self"));
#else
  const Owned locals(checked(PyObject_GetAttrString(owned.object, "f_locals")));
  return checked(PyMapping_GetItemString(locals.object, "self"));
#endif
}

int64_t module_running(int64_t w_storage) {
  const Gil gil;
  const Owned self(running());
  if (state->leaves.count(self.object) != 0) {
    return reinterpret_cast<int64_t>(self.object);
  }
  const Owned answer(checked(PyObject_CallFunction(module_of, "L", w_storage)));
  const int64_t id = PyLong_AsLongLong(answer.object);
  if (id == -1 && PyErr_Occurred() != nullptr) {
    throw Failed();
  }
  if (self.object != nullptr && id == reinterpret_cast<int64_t>(self.object)) {
    const Owned inner(checked(PyObject_GetAttrString(self.object, "_modules")));
    if (PyObject_Size(inner.object) == 0) {
      state->leaves.insert(self.object);
    }
  }
  return id;
}

const std::string* name_of(const torch::autograd::Node& node) {
  const std::type_index type(typeid(node));
  {
    const std::lock_guard<std::mutex> guard(state->lock);
    const auto found = state->nodes.find(type);
    if (found != state->nodes.end()) {
      return &found->second;
    }
  }
  std::string name = node.name(); // takes the GIL where it is an autograd.Function's
  const std::lock_guard<std::mutex> guard(state->lock);
  if (std::strstr(type.name(), "PyNode") != nullptr) {
    return &*state->named.insert(std::move(name)).first;
  }
  return &state->nodes.emplace(type, std::move(name)).first->second;
}

void note(const char* op, const at::Tensor& x, const at::Tensor& w, double seconds) {
  Note one{op, Operand(x), Operand(w), seconds, true, false, false, 0, 0, 0, nullptr};
  const auto node = torch::autograd::get_current_node();
  one.backward = node != nullptr;
  one.forward = !one.backward || repeated();
  if (one.forward) {
    // The node that will run backward was made just before the kernel was called. Inside an
    // autograd.Function's forward grad mode is off and the node is the Function's.
    one.node = static_cast<int64_t>(at::sequence_number::peek()) - 1;
    one.tracked = c10::GradMode::is_enabled();
    one.module = module_running(one.w.storage);
  } else {
    one.node = static_cast<int64_t>(node->sequence_nr());
    one.caller = name_of(*node);
  }
  const std::lock_guard<std::mutex> guard(state->lock);
  one.step = state->step;
  state->notes.push_back(one);
  state->count++;
}

void fail() {
  const std::lock_guard<std::mutex> guard(state->lock);
  state->failed++;
}

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(const char* op, c10::SafeKernelFunction native) : op_(op), native_(std::move(native)) {}

  void operator()(
      const c10::OperatorHandle& handle,
      c10::DispatchKeySet keys,
      torch::jit::Stack* stack) {
    const at::Tensor x = (stack->end() - 2)->toTensor(), w = (stack->end() - 1)->toTensor();
    const auto began = std::chrono::steady_clock::now();
    native_.callBoxed(handle, keys, stack);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
    try { // whatever fails here, the job has its product
      if (!nested()) {
        note(op_, x, w, spent.count());
      }
    } catch (const Failed&) {
      const Gil gil;
      PyErr_Clear();
      fail();
    } catch (const std::exception&) {
      fail();
    }
  }

 private:
  const char* op_;
  c10::SafeKernelFunction native_;
};

class Silent final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

PyObject* begin(PyObject* /*self*/, PyObject* args) {
  static const char* const OPS[] = {"mm", "bmm"};
  constexpr auto KEY = c10::DispatchKey::CPU;
  if (!PyArg_ParseTuple(
          args,
          "O!O!OOO",
          &PySet_Type,
          &inside,
          &PyDict_Type,
          &tasks,
          &recomputing,
          &call_impl,
          &module_of)) {
    return nullptr;
  }
  for (PyObject* const kept : {inside, tasks, recomputing, call_impl, module_of}) {
    Py_INCREF(kept);
  }
  state = new State();
  try {
    Silent silent; // torch tells whoever overrides its kernel
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    auto& dispatcher = c10::Dispatcher::singleton();
    const Owned replaced(checked(PyList_New(0)));
    for (const char* const op : OPS) {
      const c10::OperatorName name(std::string("aten::") + op, "");
      const auto handle = dispatcher.findSchemaOrThrow(name.name.c_str(), "");
      auto native = handle.getComputedKernelForDispatchKey(KEY);
      registered.emplace_back(
          op,
          dispatcher.registerImpl(
              name,
              KEY,
              c10::KernelFunction::makeFromBoxedFunctor(
                  std::make_unique<Kernel>(op, std::move(native))),
              std::nullopt,
              nullptr,
              "gemmtune's recorder"));
      const Owned one(checked(Py_BuildValue("ss", op, c10::toString(KEY))));
      if (PyList_Append(replaced.object, one.object) != 0) {
        throw Failed();
      }
    }
    return Py_NewRef(replaced.object);
  } catch (const Failed&) {
    registered.clear();
    return nullptr;
  } catch (const std::exception& error) {
    registered.clear();
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* end(PyObject* /*self*/, PyObject* /*args*/) {
  registered.clear();
  Py_RETURN_NONE;
}

PyObject* step(PyObject* /*self*/, PyObject* number) {
  const int64_t value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> guard(state->lock);
  state->step = value;
  Py_RETURN_NONE;
}

PyObject* count(PyObject* /*self*/, PyObject* /*args*/) {
  const std::lock_guard<std::mutex> guard(state->lock);
  return PyLong_FromUnsignedLongLong(state->count);
}

PyObject* failed(PyObject* /*self*/, PyObject* /*args*/) {
  const std::lock_guard<std::mutex> guard(state->lock);
  return PyLong_FromUnsignedLongLong(state->failed);
}

PyObject* numbers(const std::array<int64_t, MOST_DIMS>& values, int64_t dims) {
  const Owned made(checked(PyTuple_New(dims)));
  for (int64_t i = 0; i < dims; i++) {
    PyTuple_SET_ITEM(made.object, i, checked(PyLong_FromLongLong(values.at(i))));
  }
  return Py_NewRef(made.object);
}

PyObject* operand(const Operand& o) {
  auto* const type = reinterpret_cast<PyObject*>(torch::getTHPDtype(o.type));
  return checked(Py_BuildValue("NNO", numbers(o.sizes, o.dims), numbers(o.strides, o.dims), type));
}

PyObject* told(const Note& n) {
  return checked(Py_BuildValue(
      "LsNNLLdNNLNLs",
      n.step,
      n.op,
      operand(n.x),
      operand(n.w),
      n.x.storage,
      n.w.storage,
      n.seconds,
      PyBool_FromLong(n.forward),
      PyBool_FromLong(n.backward),
      n.node,
      PyBool_FromLong(n.tracked),
      n.module,
      n.caller == nullptr ? "" : n.caller->c_str()));
}

PyObject* take(PyObject* /*self*/, PyObject* /*args*/) {
  std::deque<Note> notes;
  {
    const std::lock_guard<std::mutex> guard(state->lock);
    notes.swap(state->notes);
  }
  try {
    const Owned list(checked(PyList_New(0)));
    for (const Note& one : notes) {
      const Owned made(told(one));
      if (PyList_Append(list.object, made.object) != 0) {
        throw Failed();
      }
    }
    return Py_NewRef(list.object);
  } catch (const Failed&) {
    return nullptr;
  }
}

PyObject* forget(PyObject* /*self*/, PyObject* /*args*/) {
  state = new State(); // the parent's lock may be held by a thread that it alone has
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"begin",
     begin,
     METH_VARARGS,
     "begin(inside, tasks, recomputing, call_impl, module_of): note calls from now on.\n"
     "Says which kernels are replaced, by overload and dispatch key."},
    {"end", end, METH_NOARGS, "Leave torch as it was; what was noted stays."},
    {"step", step, METH_O, "step(number): the step that calls from now on belong to"},
    {"count", count, METH_NOARGS, "Calls noted so far."},
    {"failed", failed, METH_NOARGS, "Calls that could not be noted so far."},
    {"take", take, METH_NOARGS, "What was noted since this was asked last, in order."},
    {"forget", forget, METH_NOARGS, "In a forked child: begin anew."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "noting",
    nullptr,
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr};

} // namespace

PyMODINIT_FUNC PyInit_noting() {
  return PyModule_Create(&definition);
}
