// A simulated accelerator for torch, as asynchronous as a GPU: every operator is queued on the current stream and computed later
// by that stream's thread with the CPU's kernels.
//
// - Device memory is mapped twice: tensors hold addresses of a mapping that nobody may read (host code that touches it faults),
//   the streams' threads use the other one.
// - The allocator has a pool per stream, as torch's caching allocator for CUDA. What is given out is overwritten with 0xFF (NaN) first,
//   in the order of its stream. With SIM_POISON=2 that is done as soon as it is freed, as if the stream's next user got it at once:
//   stricter than CUDA where a program orders a stream before it allocates on it.
// - A kernel holds no reference to its memory; pinned host memory is read and written when the stream gets there.
// - A graph is captured as on CUDA: what streams would run is recorded instead, with the waits between them, and replayed on
//   the same addresses (`Capture`).
// - Shapes of results come from the meta device. What that does not know (and random numbers) is computed by the host behind a wait.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace sim {

using Clock = std::chrono::steady_clock;
constexpr auto kDev = c10::DeviceType::PrivateUse1;
static const c10::Device device0(kDev, 0);

// --- errors, host waits --------------------------------------------------------------------------------------------

static std::mutex error_mutex;
static std::string sticky;  // of a stream's thread: every later wait of the host raises it, as on CUDA

static void note_error(const std::string& text) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (sticky.empty()) {
    sticky = text;
    fprintf(stderr, "[sim] a stream failed: %s\n", text.c_str());
  }
}

static void raise_sticky() {
  std::lock_guard<std::mutex> lock(error_mutex);
  TORCH_CHECK(sticky.empty(), "sim device: ", sticky);
}

static py::object* wait_callback = nullptr;   // called with the reason of each wait of the host
static py::object* order_callback = nullptr;  // called with the kind of each order that the host makes; True leaves it out
static std::map<std::string, int64_t> waits, launches;
static std::mutex stats_mutex;

static void note_wait(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(stats_mutex);
    waits[why]++;
  }
  if (wait_callback != nullptr) {
    py::gil_scoped_acquire gil;
    (*wait_callback)(why);
  }
}

static bool left_out(const std::string& kind) {
  if (order_callback == nullptr) return false;
  py::gil_scoped_acquire gil;
  return (*order_callback)(kind).cast<bool>();
}

// --- streams and events --------------------------------------------------------------------------------------------

struct Capture;

struct Flag {
  std::shared_ptr<Capture> capture;  // that records it, of a flag that nobody will set
  int number = -1;                   // in that capture
  std::map<int64_t, int64_t> seen;   // of each captured stream, how many of its tasks are in front
  std::mutex m;
  std::condition_variable cv;
  bool done = false;
  Clock::time_point at;
  void set() {
    {
      std::lock_guard<std::mutex> lock(m);
      done = true;
      at = Clock::now();
    }
    cv.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(m);
    cv.wait(lock, [this] { return done; });
  }
  bool query() {
    std::lock_guard<std::mutex> lock(m);
    return done;
  }
};
using FlagPtr = std::shared_ptr<Flag>;

// --- capture -------------------------------------------------------------------------------------------------------

struct Block;
struct Stream;

// A graph, or one that is being captured. While a stream is captured, nothing runs on it: `ops` has what is queued there, in
// the order of the host. A stream that waits for an event of a captured stream is captured from then on, too. As on CUDA,
// whatever the host may not do meanwhile raises, and spoils the capture: what comes later, and its end, raise as well.
struct Capture {
  enum Kind { kTask, kSet, kWait };
  struct Op {
    Kind kind;
    int64_t stream;
    std::function<void()> task;
    bool kernel;
    int flag;
  };
  int64_t origin = 0, pool = 0;
  std::thread::id thread;
  bool ended = false;
  std::string spoiled;  // by what
  std::vector<Op> ops;
  int flags = 0;
  std::set<int64_t> streams;
  std::map<int64_t, int64_t> tasks;                    // by stream
  std::map<int64_t, std::map<int64_t, int64_t>> seen;  // by stream: of each stream, how many of its tasks are in front
  std::unordered_map<Block*, int64_t> outside;         // memory of other pools that the graph uses, and its generation
  std::vector<Block*> later;                           // freed meanwhile, with users on other streams
};
using CapturePtr = std::shared_ptr<Capture>;

static std::recursive_mutex capture_mutex;  // taken behind no other
static CapturePtr active;                   // one at a time
static std::atomic<bool> capturing{false};

[[noreturn]] static void refuse(const CapturePtr& c, const std::string& what) {
  std::lock_guard<std::recursive_mutex> lock(capture_mutex);
  if (c != nullptr && !c->ended && c->spoiled.empty()) c->spoiled = what;
  TORCH_CHECK(false, "sim device: not permitted while a graph is captured: ", what);
}

static CapturePtr capture_of_thread();

// Raise if this thread captures: what the host would wait for, or look at, has not run.
static void check_host(const std::string& what) {
  if (CapturePtr c = capture_of_thread()) refuse(c, what);
}

// The same, and raise for an event that was recorded into a graph: it is none that ever comes.
static void check_flag(const FlagPtr& flag, const std::string& what) {
  check_host(what);
  if (flag != nullptr && flag->capture != nullptr) refuse(flag->capture, what + " of an event that was recorded while capturing");
}

static std::atomic<int64_t> delay_us{0}, delay_percent{0}, delay_seed{1}, delays_told{0};

struct Stream {
  explicit Stream(int64_t id) : id(id), rng(id * 7919 + delay_seed), thread([this] { loop(); }) {
    thread.detach();
  }
  CapturePtr captured() {
    if (!capturing) return nullptr;
    std::lock_guard<std::recursive_mutex> lock(capture_mutex);
    return capture;
  }
  static void check_whole(const CapturePtr& c) {
    TORCH_CHECK(c->spoiled.empty(), "sim device: the capture was spoiled: ", c->spoiled);
  }
  void push(std::function<void()> task, bool kernel = true) {
    if (CapturePtr c = captured()) {
      std::lock_guard<std::recursive_mutex> lock(capture_mutex);
      check_whole(c);
      c->ops.push_back({Capture::kTask, id, std::move(task), kernel, -1});
      c->seen[id][id] = ++c->tasks[id];
      return;
    }
    queue_now(std::move(task), kernel);
  }
  void queue_now(std::function<void()> task, bool kernel) {
    {
      std::lock_guard<std::mutex> lock(m);
      queue.emplace_back(std::move(task), kernel);
      submitted++;
    }
    cv.notify_one();
  }
  FlagPtr mark() {
    auto flag = std::make_shared<Flag>();
    if (CapturePtr c = captured()) {
      std::lock_guard<std::recursive_mutex> lock(capture_mutex);
      check_whole(c);
      flag->capture = c, flag->number = c->flags++, flag->seen = c->seen[id];
      c->ops.push_back({Capture::kSet, id, nullptr, false, flag->number});
    } else {
      queue_now([flag] { flag->set(); }, false);
    }
    return flag;
  }
  void behind(FlagPtr flag) {
    if (flag == nullptr) return;
    CapturePtr mine = captured(), its = flag->capture;
    if (its == nullptr && mine == nullptr) {
      if (!flag->query()) queue_now([flag] { flag->wait(); }, false);
      return;
    }
    std::lock_guard<std::recursive_mutex> lock(capture_mutex);
    if (its == nullptr) refuse(mine, "a wait for an event that was recorded outside of the capture");
    if (its->ended) refuse(mine, "a wait for an event of a graph that was captured before");
    check_whole(its);
    capture = its;
    its->streams.insert(id);
    for (auto& [stream, tasks] : flag->seen) its->seen[id][stream] = std::max(its->seen[id][stream], tasks);
    its->ops.push_back({Capture::kWait, id, nullptr, false, flag->number});
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(m);
    return completed == submitted;
  }
  void loop() {
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    while (true) {
      std::pair<std::function<void()>, bool> task;
      {
        std::unique_lock<std::mutex> lock(m);
        cv.wait(lock, [this] { return !queue.empty(); });
        task = std::move(queue.front());
        queue.pop_front();
      }
      if (told != delays_told) {
        told = delays_told;
        rng.seed(id * 7919 + delay_seed);
      }
      const int64_t own = slow_us.load();
      if (task.second && own > 0) std::this_thread::sleep_for(std::chrono::microseconds(own));
      if (task.second && delay_us > 0 && static_cast<int64_t>(rng() % 100) < delay_percent)
        std::this_thread::sleep_for(std::chrono::microseconds(rng() % delay_us));
      try {
        task.first();
      } catch (const std::exception& e) {
        note_error(e.what());
      }
      task.first = nullptr;
      std::lock_guard<std::mutex> lock(m);
      completed++;
    }
  }
  const int64_t id;
  CapturePtr capture;  // while it is captured
  std::atomic<int64_t> slow_us{0};
  int64_t told = 0;
  std::mt19937_64 rng;
  std::mutex m;
  std::condition_variable cv;
  std::deque<std::pair<std::function<void()>, bool>> queue;
  uint64_t submitted = 0, completed = 0;
  std::thread thread;  // last: it uses the others
};

static std::mutex streams_mutex;
static std::deque<Stream*> streams;  // never freed, by id
static thread_local int64_t current_id = 0;

static Stream* stream_of(int64_t id) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  if (streams.empty()) streams.push_back(new Stream(0));
  TORCH_CHECK(id >= 0 && id < static_cast<int64_t>(streams.size()), "no stream ", id);
  return streams[id];
}

static Stream* new_stream() {
  stream_of(0);
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams.push_back(new Stream(streams.size()));
  return streams.back();
}

static Stream* current() {
  return stream_of(current_id);
}

static CapturePtr capture_of_thread() {
  if (!capturing) return nullptr;
  std::lock_guard<std::recursive_mutex> lock(capture_mutex);
  if (CapturePtr c = current()->captured()) return c;
  return active != nullptr && active->thread == std::this_thread::get_id() ? active : nullptr;
}

static void host_wait(FlagPtr flag, const std::string& why) {
  if (left_out(why)) return;
  check_flag(flag, why);
  if (!flag->query()) {
    note_wait(why);
    if (PyGILState_Check()) {
      py::gil_scoped_release release;
      flag->wait();
    } else {
      flag->wait();
    }
  } else {
    note_wait(why + " (over already)");
  }
  raise_sticky();
}

static void synchronize_all(const std::string& why) {
  check_host(why);
  std::vector<FlagPtr> flags;
  {
    stream_of(0);
    std::lock_guard<std::mutex> lock(streams_mutex);
    for (auto* s : streams) flags.push_back(s->mark());
  }
  for (auto& flag : flags) host_wait(flag, why);
}

struct Event {
  FlagPtr flag;
};

// --- device memory -------------------------------------------------------------------------------------------------

static char* seen = nullptr;    // what tensors hold
static char* hidden = nullptr;  // what streams use
static size_t total_bytes = 0, top = 0;
static bool protect = true, poison = true, poison_freed = false;

static void map_memory() {
  if (seen != nullptr) return;
  const char* size = getenv("SIM_MEMORY_MB");
  total_bytes = (size ? atoll(size) : 8192) << 20;
  const char* p = getenv("SIM_PROTECT");
  protect = p == nullptr || atoi(p) != 0;
  const char* q = getenv("SIM_POISON");
  poison = q == nullptr || atoi(q) != 0;
  poison_freed = q != nullptr && atoi(q) == 2;
  int fd = memfd_create("sim", 0);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, total_bytes) == 0, "no memory for the sim device");
  hidden = static_cast<char*>(mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0));
  seen = static_cast<char*>(mmap(nullptr, total_bytes, protect ? PROT_NONE : PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0));
  TORCH_CHECK(hidden != MAP_FAILED && seen != MAP_FAILED, "cannot map memory of the sim device");
  close(fd);
}

static bool on_device(const void* p) {
  return seen != nullptr && p >= seen && p < seen + total_bytes;
}

static void* real(const void* p) {
  if (p == nullptr) return nullptr;
  TORCH_CHECK(on_device(p), "not an address of the sim device");
  return hidden + (static_cast<const char*>(p) - seen);
}

struct Block {
  char* ptr;
  size_t size, asked;
  int64_t stream;
  std::set<int64_t> users;
  int64_t pool = 0;        // of a graph; 0 for the pool of all others
  int64_t generation = 0;  // how often it was given out
};

struct SimAllocator final : c10::DeviceAllocator {
  std::mutex m;
  std::map<std::tuple<int64_t, int64_t, size_t>, std::vector<Block*>> free_blocks;  // by pool, stream and size
  std::map<void*, Block*> blocks;
  std::vector<std::pair<Block*, std::vector<FlagPtr>>> pending;
  int64_t now = 0, peak = 0, reserved = 0, count = 0;

  static void deleter(void* p);

  c10::DataPtr allocate(size_t n) override {
    map_memory();
    if (n == 0) return {nullptr, nullptr, &deleter, device0};
    const size_t size = (n + 511) / 512 * 512;
    const int64_t stream = current_id;
    const CapturePtr mine = current()->captured();
    if (mine == nullptr) check_host("an allocation on stream " + std::to_string(stream) + ", which is not captured");
    const int64_t pool = mine == nullptr ? 0 : mine->pool;
    Block* block = nullptr;
    {
      std::lock_guard<std::mutex> lock(m);
      collect();
      auto& list = free_blocks[{pool, stream, size}];
      if (!list.empty()) {
        block = list.back();
        list.pop_back();
        if (poison) overwrite(block);
      } else {
        if (top + size > total_bytes) C10_THROW_ERROR(OutOfMemoryError, "sim device: out of memory");
        block = new Block{seen + top, size, n, stream, {}, pool};
        top += size;
        reserved += size;
        if (poison) memset(real(block->ptr), 0xFF, size);
        if (poison && pool) overwrite(block);  // in each replay
      }
      block->asked = n;
      block->generation++;
      blocks[block->ptr] = block;
      now += size;
      count++;
      peak = std::max(peak, now);
    }
    return {block->ptr, block->ptr, &deleter, device0};
  }
  void overwrite(Block* block) {
    void* p = real(block->ptr);
    const size_t size = block->size;
    stream_of(block->stream)->push([p, size] { memset(p, 0xFF, size); }, false);
  }
  void release(Block* block) {  // m is held
    // What is freed while its stream is captured is of no concern to replays, unless it is of the graph.
    if (poison_freed && (block->pool || stream_of(block->stream)->captured() == nullptr)) overwrite(block);
    free_blocks[{block->pool, block->stream, block->size}].push_back(block);
  }
  // A graph that is captured uses this address.
  void note_use(const void* p) {
    const CapturePtr c = capture_of_thread();
    if (c == nullptr || p == nullptr) return;
    std::lock_guard<std::mutex> lock(m);
    auto it = blocks.upper_bound(const_cast<void*>(p));
    if (it == blocks.begin()) return;
    Block* block = (--it)->second;
    if (p < block->ptr + block->size && block->pool != c->pool) c->outside.emplace(block, block->generation);
  }
  void check_alive(const Capture& c) {
    std::lock_guard<std::mutex> lock(m);
    for (auto& [block, generation] : c.outside) {
      const bool kept = block->pool != 0 || blocks.count(block->ptr);  // that of another graph is given to none but graphs
      TORCH_CHECK(kept && block->generation == generation, "sim device: the graph uses ", block->asked,
                  " bytes that were allocated outside of its capture and freed since");
    }
  }
  void collect() {  // m is held
    for (size_t i = 0; i < pending.size();) {
      bool done = true;
      for (auto& flag : pending[i].second) done = done && flag->query();
      if (done) {
        release(pending[i].first);
        pending[i] = pending.back();
        pending.pop_back();
      } else {
        i++;
      }
    }
  }
  void free(void* p) {
    if (p == nullptr) return;
    std::lock_guard<std::mutex> lock(m);
    auto it = blocks.find(p);
    if (it == blocks.end()) return;
    Block* block = it->second;
    blocks.erase(it);
    now -= block->size;
    if (block->users.empty()) {
      release(block);
    } else if (const CapturePtr c = capture_of_thread()) {
      block->users.clear();
      c->later.push_back(block);
    } else {
      std::vector<FlagPtr> flags;
      for (int64_t user : block->users) flags.push_back(stream_of(user)->mark());
      block->users.clear();
      pending.emplace_back(block, flags);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &deleter;
  }
  void copy_data(void* dest, const void* src, std::size_t n) const override {
    void *d = real(dest), *s = real(src);
    const_cast<SimAllocator*>(this)->note_use(dest), const_cast<SimAllocator*>(this)->note_use(src);
    current()->push([d, s, n] { memcpy(d, s, n); });
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(m);
    auto it = blocks.find(ptr.get());
    if (it != blocks.end() && it->second->stream != stream.id()) it->second->users.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(m);
    c10::CachingDeviceAllocator::DeviceStats s;
    s.allocated_bytes[0].current = now;
    s.allocated_bytes[0].peak = peak;
    s.active_bytes[0].current = now;
    s.active_bytes[0].peak = peak;
    s.requested_bytes[0].current = now;
    s.requested_bytes[0].peak = peak;
    s.reserved_bytes[0].current = reserved;
    s.reserved_bytes[0].peak = reserved;
    s.allocation[0].current = static_cast<int64_t>(blocks.size());
    s.allocation[0].allocated = count;
    return s;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    map_memory();
    std::lock_guard<std::mutex> lock(m);
    return {total_bytes - top, total_bytes};
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(m);
    peak = now;
  }
};
static SimAllocator allocator;
void SimAllocator::deleter(void* p) {
  allocator.free(p);
}
REGISTER_ALLOCATOR(kDev, &allocator)

// --- pinned host memory --------------------------------------------------------------------------------------------

static std::mutex pinned_mutex;
static std::map<char*, size_t> pinned;

static bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto it = pinned.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (it == pinned.begin()) return false;
  --it;
  return p < it->first + it->second;
}

struct PinnedAllocator final : c10::Allocator {
  static void deleter(void* p) {
    if (p == nullptr) return;
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      auto it = pinned.find(static_cast<char*>(p));
      memset(p, 0xFF, it->second);
      pinned.erase(it);
    }
    ::free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, std::max<size_t>(n, 64)) == 0, "no host memory");
    memset(p, 0xFF, std::max<size_t>(n, 64));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(p)] = std::max<size_t>(n, 64);
    return {p, p, &deleter, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &deleter;
  }
  void copy_data(void* dest, const void* src, std::size_t n) const override {
    memcpy(dest, src, n);
  }
};
static PinnedAllocator pinned_allocator;

// --- guard, generator, hooks ---------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDev;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return device0;
  }
  c10::Device getDevice() const override {
    return device0;
  }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() <= 0, "the sim device has index 0 only");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  static c10::Stream pack(int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device0, id);
  }
  c10::Stream getStream(c10::Device) const override {
    return pack(current_id);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return pack(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return pack(new_stream()->id);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return pack(new_stream()->id);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const int64_t before = current_id;
    current_id = s.id();
    return pack(before);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->flag = stream_of(stream.id())->mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr && !left_out("stream behind an event")) stream_of(stream.id())->behind(static_cast<Event*>(event)->flag);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr || static_cast<Event*>(event)->flag == nullptr) return true;
    check_flag(static_cast<Event*>(event)->flag, "a query");
    return static_cast<Event*>(event)->flag->query();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryStream(const c10::Stream& s) const override {
    if (const CapturePtr c = stream_of(s.id())->captured()) refuse(c, "a query of a stream that is captured");
    check_host("a query of a stream");
    return stream_of(s.id())->idle();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    check_host("Stream.synchronize");
    host_wait(stream_of(s.id())->mark(), "Stream.synchronize");
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr && static_cast<Event*>(event)->flag != nullptr)
      host_wait(static_cast<Event*>(event)->flag, "Event.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    synchronize_all("device synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& s) const override {
    allocator.recordStream(ptr, s);
  }
  double elapsedTime(void* one, void* two, const c10::DeviceIndex) const override {
    auto a = static_cast<Event*>(one)->flag, b = static_cast<Event*>(two)->flag;
    check_flag(a, "the time"), check_flag(b, "the time");
    return std::chrono::duration<double, std::milli>(b->at - a->at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : at::CPUGeneratorImpl {
  Generator() : at::CPUGeneratorImpl() {
    device_ = device0;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

static const at::Generator& default_generator() {
  static at::Generator g = at::make_generator<Generator>();
  return g;
}

static void resize_bytes(c10::StorageImpl* impl, size_t n) {
  const size_t before = impl->nbytes();
  if (n == 0) {
    impl->set_data_ptr_noswap(c10::DataPtr(nullptr, device0));
  } else {
    c10::DataPtr fresh = allocator.allocate(n);
    if (before != 0 && impl->data() != nullptr) allocator.copy_data(fresh.mutable_get(), impl->data(), std::min(before, n));
    impl->set_data_ptr_noswap(std::move(fresh));
  }
  impl->set_nbytes(n);
}

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
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void* p) const override {
    return is_pinned(p);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  at::Device getDeviceFromPtr(void*) const override {
    return device0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    resize_bytes(storage.unsafeGetStorageImpl(), n);
  }
};

// --- memory of tensors ---------------------------------------------------------------------------------------------

static const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

static at::Tensor host_view(const at::Tensor& t) {  // for stream threads: a CPU tensor over the memory
  void* p = t.numel() == 0 ? nullptr : real(t.const_data_ptr());
  if (p != nullptr) allocator.note_use(t.const_data_ptr());
  return at::from_blob(p, t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
}

static at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                        std::optional<at::Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only memory of the host can be pinned");
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only memory of the host can be pinned");
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

static void grow(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  const size_t need = at::detail::computeStorageNbytes(size, stride, t.dtype().itemsize(), offset);
  auto* impl = t.storage().unsafeGetStorageImpl();
  if (need > impl->nbytes()) {
    TORCH_CHECK(impl->resizable(), "storage cannot be resized");
    resize_bytes(impl, need);
  }
}

static const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  std::vector<int64_t> stride(size.size());
  int64_t step = 1;
  for (int64_t i = static_cast<int64_t>(size.size()) - 1; i >= 0; i--) {
    stride[i] = step;
    step *= std::max<int64_t>(size[i], 1);
  }
  if (self.sizes() == size) return self;
  grow(self, size, stride, self.storage_offset());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

static at::Tensor& set_whole(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  std::vector<int64_t> steps(stride.begin(), stride.end());
  if (stride.size() != size.size()) {
    steps.assign(size.size(), 1);
    for (int64_t i = static_cast<int64_t>(size.size()) - 2; i >= 0; i--) steps[i] = steps[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, steps);
  if (self.numel() != 0) grow(self, size, steps, offset);
  return self;
}

static at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const int64_t n = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_whole(self, std::move(storage), 0, {n}, {1});
}

static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_whole(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static at::Tensor& set_nothing(at::Tensor& self) {
  at::Tensor fresh = empty({0}, self.scalar_type(), std::nullopt, device0, false, std::nullopt);
  return set_whole(self, fresh.storage(), 0, {0}, {1});
}

static at::Scalar item(const at::Tensor& self) {
  host_wait(current()->mark(), "item()");
  return at::native::_local_scalar_dense_cpu(host_view(self));
}

// --- copies --------------------------------------------------------------------------------------------------------

static at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (self.numel() == 0) return dst;
  if (!self.is_cpu() && !dst.is_cpu()) {
    TORCH_CHECK(self.device().type() == kDev && dst.device().type() == kDev, "copy between ", self.device(), " and ", dst.device());
    at::Tensor from = host_view(self), to = host_view(dst);
    if (self.is_conj()) from = from.conj();
    if (self.is_neg()) from = at::_neg_view(from);
    current()->push([from, to]() mutable { to.copy_(from); });
    return dst;
  }
  const bool straight = self.scalar_type() == dst.scalar_type() && self.is_contiguous() && dst.is_contiguous() && !self.is_conj() &&
      !self.is_neg() && self.sizes() == dst.sizes();
  if (self.is_cpu()) {
    at::Tensor to = host_view(dst);
    if (straight && is_pinned(self.const_data_ptr())) {  // read when the stream gets there; its memory stays until then
      const void* from = self.const_data_ptr();
      void* into = real(dst.const_data_ptr());
      const size_t n = self.nbytes();
      c10::Storage keep = self.storage();
      current()->push([from, into, n, keep] { memcpy(into, from, n); });
    } else {
      check_host("a copy from pageable memory of the host");
      at::Tensor from = self.clone();  // staged: the caller may write to it as soon as this returns
      current()->push([from, to]() mutable { to.copy_(from); });
    }
    if (!non_blocking) host_wait(current()->mark(), "copy from the host");
    return dst;
  }
  at::Tensor from = host_view(self);
  if (straight && non_blocking && is_pinned(dst.const_data_ptr())) {
    void* into = dst.data_ptr();
    const void* source = real(self.const_data_ptr());
    allocator.note_use(self.const_data_ptr());
    const size_t n = self.nbytes();
    c10::Storage keep = dst.storage();
    current()->push([into, source, n, keep] { memcpy(into, source, n); });
    return dst;
  }
  at::Tensor landed = at::empty(self.sizes(), dst.options().dtype(self.scalar_type()).pinned_memory(false));
  current()->push([from, landed]() mutable { landed.copy_(from); });
  host_wait(current()->mark(), "copy to the host");
  if (self.is_conj()) landed = landed.conj();
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor out = dst;
  out.copy_(landed);
  return dst;
}

static at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::Tensor out = dst;
  if (out.sizes() != self.sizes()) out.resize_(self.sizes());
  return copy_from(self, out, false);
}

static void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator.recordStream(self.storage().data_ptr(), stream);
}

// --- every other operator ------------------------------------------------------------------------------------------

template <class F>
static c10::IValue mapped(const c10::IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    auto list = v.toTensorVector();
    for (auto& t : list) t = f(t);
    return c10::IValue(std::move(list));
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector())
      out.push_back(t.has_value() && t->defined() ? std::optional<at::Tensor>(f(*t)) : t);
    return out;
  }
  return v;
}

static c10::IValue on(const c10::IValue& v, c10::DeviceType type) {
  return v.isDevice() ? c10::IValue(c10::Device(type)) : v;
}

struct Known {
  bool host = false;  // computed by the host, behind the stream
  std::string why, name;
  bool indexes = false;
};

static const Known& known(const c10::OperatorHandle& op) {
  static std::mutex m;
  static std::unordered_map<c10::OperatorName, Known> all;
  std::lock_guard<std::mutex> lock(m);
  auto it = all.find(op.operator_name());
  if (it != all.end()) return it->second;
  Known k;
  k.name = c10::toString(op.operator_name());
  const auto& schema = op.schema();
  for (const auto& r : schema.returns()) {
    const bool tensors = r.type()->isSubtypeOf(*c10::TensorType::get()) || r.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensors) k.host = true, k.why = "a result that is no tensor";
    if (r.alias_info() != nullptr && !r.alias_info()->isWrite()) k.host = true, k.why = "a view";
  }
  for (const auto& a : schema.arguments())
    if (a.type()->str().find("Generator") != std::string::npos) k.host = true, k.why = "random numbers";
  if (op.hasTag(at::Tag::nondeterministic_seeded)) k.host = true, k.why = "random numbers";
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) k.host = true, k.why = "shape depends on data";
  k.indexes = k.name.find("index") != std::string::npos;
  return all.emplace(op.operator_name(), k).first->second;
}

static void by_host(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::string& name, const std::string& why) {
  check_host(name + ", which the host computes (" + why + ")");
  {
    std::lock_guard<std::mutex> lock(stats_mutex);
    launches["host " + name + ": " + why]++;
  }
  const size_t n = op.schema().arguments().size();
  at::Generator device_generator, cpu_generator;
  for (size_t i = 0; i < n; i++) {
    c10::IValue& v = (*stack)[stack->size() - n + i];
    const std::string type = op.schema().arguments()[i].type()->str();
    if (type.find("Generator") == std::string::npos) continue;
    device_generator = v.isNone() ? default_generator() : v.toGenerator();
    TORCH_CHECK(device_generator.device().type() == kDev, "Expected a 'sim' device type for generator but found ", device_generator.device());
    cpu_generator = at::detail::createCPUGenerator();
    std::lock_guard<std::mutex> lock(device_generator.mutex());
    cpu_generator.set_state(device_generator.get_state());
    v = cpu_generator;
  }
  at::native::cpu_fallback(op, stack);
  if (device_generator.defined()) {
    std::lock_guard<std::mutex> lock(device_generator.mutex());
    device_generator.set_state(cpu_generator.get_state());
  }
}

static void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Known& k = known(op);
  if (k.host) return by_host(op, stack, k.name, k.why);
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  std::vector<c10::IValue> args(stack->end() - n, stack->end());

  bool any_device = false;
  auto check = [&](const at::Tensor& t, bool written) {
    if (!t.defined()) return;
    if (t.device().type() == kDev) {
      any_device = true;
      return;
    }
    TORCH_CHECK(t.is_cpu() && !written && (t.dim() == 0 || k.indexes),
                "Expected all tensors to be on the same device, but found at least two devices, sim:0 and ", t.device(), ", in ", k.name);
  };
  for (size_t i = 0; i < n; i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    mapped(args[i], [&](const at::Tensor& t) {
      check(t, written);
      return t;
    });
  }

  // Shapes of the results. Of batch norm in bf16 meta has statistics of another dtype than the CPU.
  if (k.name.rfind("aten::native_batch_norm", 0) == 0) return by_host(op, stack, k.name, "meta has other statistics");
  torch::jit::Stack metas;
  for (const auto& arg : args)
    metas.push_back(on(mapped(arg, [](const at::Tensor& t) -> at::Tensor {
                         if (!t.defined() || t.is_cpu()) return t;
                         at::Tensor m = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
                         if (t.unsafeGetTensorImpl()->is_wrapped_number()) m.unsafeGetTensorImpl()->set_wrapped_number(true);
                         return m;
                       }),
                       c10::DeviceType::Meta));
  const torch::jit::Stack meta_args(metas);
  // What optimizers do element by element has a result of known shape here, and meta finds that out in Python.
  static const std::set<std::string> elementwise{"aten::add", "aten::addcdiv", "aten::addcmul",    "aten::div",  "aten::lerp", "aten::mul",
                                                 "aten::neg", "aten::pow",     "aten::reciprocal", "aten::sqrt", "aten::sub"};
  const auto* last = n ? schema.arguments()[n - 1].alias_info() : nullptr;
  bool is_known = elementwise.count(schema.name()) && last != nullptr && last->isWrite() && args[n - 1].isTensor(), is_whole = false;
  for (size_t i = 0; is_known && i + 1 < n; i++) {
    if (!args[i].isTensor()) continue;
    const at::Tensor t = args[i].toTensor(), out = args[n - 1].toTensor();
    is_whole = is_whole || t.sizes() == out.sizes();
    is_known = t.dim() == 0 || t.sizes() == out.sizes();
  }
  if (!(is_known && is_whole)) try {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&metas);
  } catch (const std::exception& e) {
    std::string why = e.what();
    return by_host(op, stack, k.name, "meta says " + why.substr(0, why.find('\n')).substr(0, 100));
  }

  if (k.name == "aten::native_layer_norm") {  // of which meta has the statistics in float32, as CUDA does
    const at::Tensor input = args[0].toTensor();
    const auto weight = args[2].toOptional<at::Tensor>();
    const bool mixed = weight.has_value() && weight->defined() && weight->scalar_type() != input.scalar_type();
    for (size_t r = 1; r < metas.size(); r++) metas[r] = metas[r].toTensor().to(mixed ? at::kFloat : input.scalar_type());
  }

  // Memory of the results, then the kernel.
  for (size_t i = 0; i < n; i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite() || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
    const at::Tensor after = meta_args[i].toTensor(), t = args[i].toTensor();
    if (after.sizes() != t.sizes()) {
      grow(t, after.sizes(), after.strides(), t.storage_offset());
      t.unsafeGetTensorImpl()->set_sizes_and_strides(after.sizes(), after.strides());
    }
  }
  auto inputs = std::make_shared<torch::jit::Stack>();
  for (const auto& arg : args)
    inputs->push_back(on(mapped(arg, [](const at::Tensor& t) -> at::Tensor {
                           if (!t.defined()) return t;
                           at::Tensor h = t.is_cpu() ? t.clone() : host_view(t);  // kernels take numbers of the host when launched
                           if (t.unsafeGetTensorImpl()->is_wrapped_number()) h.unsafeGetTensorImpl()->set_wrapped_number(true);
                           return h;
                         }),
                         c10::DeviceType::CPU));
  auto outputs = std::make_shared<std::vector<std::vector<at::Tensor>>>();  // over memory of fresh results; empty for aliases
  torch::jit::Stack results;
  auto fresh = [&](const at::Tensor& m, std::vector<at::Tensor>& list) -> at::Tensor {
    if (!m.defined()) {
      list.emplace_back();
      return m;
    }
    at::Tensor t = at::detail::empty_strided_generic(m.sizes(), m.strides(), &allocator, keys, m.scalar_type());
    list.push_back(host_view(t));
    return t;
  };
  for (size_t r = 0; r < schema.returns().size(); r++) {
    const auto* alias = schema.returns()[r].alias_info();
    outputs->emplace_back();
    if (alias != nullptr) {
      for (size_t i = 0; i < n; i++) {
        const auto* other = schema.arguments()[i].alias_info();
        if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets()) {
          results.push_back(args[i]);
          break;
        }
      }
      TORCH_CHECK(results.size() == r + 1, "no argument for a result of ", k.name);
      continue;
    }
    const c10::IValue& m = metas[r];
    if (m.isTensor()) {
      results.push_back(fresh(m.toTensor(), outputs->back()));
    } else {
      auto list = m.toTensorVector();
      for (auto& t : list) t = fresh(t, outputs->back());
      results.push_back(list);
    }
  }
  {
    std::lock_guard<std::mutex> lock(stats_mutex);
    launches[k.name]++;
  }
  const c10::OperatorHandle handle = op;
  const std::string name = k.name;
  current()->push([handle, inputs, outputs, name] {
    try {
      torch::jit::Stack stack = *inputs;  // a graph calls it again
      handle.callBoxed(&stack);
      for (size_t r = 0; r < outputs->size(); r++) {
        auto& into = (*outputs)[r];
        if (into.empty()) continue;
        std::vector<at::Tensor> got;
        const c10::IValue& v = stack[r];
        if (v.isTensor())
          got = {v.toTensor()};
        else
          got = v.toTensorVector();
        TORCH_CHECK(got.size() == into.size(), "other results than meta says");
        for (size_t j = 0; j < got.size(); j++) {
          if (!into[j].defined() || !got[j].defined()) continue;
          TORCH_CHECK(got[j].sizes() == into[j].sizes() && got[j].scalar_type() == into[j].scalar_type(), "another result than meta says");
          into[j].copy_(got[j]);
        }
      }
    } catch (const std::exception& e) {
      throw std::runtime_error(name + ": " + e.what());
    }
  });
  torch::jit::drop(*stack, n);
  for (auto& r : results) stack->push_back(std::move(r));
}

// A device of its own has other operators for convolutions than the CPU: they become those of the CPU.
static void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  launch(op, stack);
}

static void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto at = stack->end() - 7;  // behind gradient, input and weight: the sizes of the bias, one for each channel of the output
  const int64_t channels = (at - 3)->toTensor().size(1);
  stack->insert(at, c10::IValue(std::vector<int64_t>{channels}));
  launch(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_whole);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_local_scalar_dense", &item);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // Without a kernel of its own it is taken apart into other operators, whose last bits differ.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&launch>());
}

// --- collectives ---------------------------------------------------------------------------------------------------

struct SimWork final : c10d::Work {
  SimWork(FlagPtr end, int64_t stream, std::vector<at::Tensor> keep, std::vector<at::Tensor> outputs)
      : c10d::Work(-1, c10d::OpType::UNKNOWN), end(std::move(end)), stream(stream), keep(std::move(keep)), outputs(std::move(outputs)) {}
  bool isCompleted() override {
    check_flag(end, "a query");
    return end->query();
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    if (!left_out("stream behind a message")) current()->behind(end);
    keep.clear();
    if (blocking) host_wait(end, "barrier");
    return true;
  }
  void synchronize() override {
    wait(std::chrono::milliseconds(0));
  }
  std::vector<at::Tensor> result() override {
    return outputs;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future) {
      const int64_t before = current_id;
      current_id = stream;
      future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device0});
      future->markCompleted(c10::IValue(outputs));
      current_id = before;
    }
    return future;
  }
  FlagPtr end;
  int64_t stream;
  bool blocking = false;
  std::vector<at::Tensor> keep, outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

struct Xfer {
  bool sends;
  int peer;
  at::Tensor t;
  int tag;
};

using Tensors = std::vector<at::Tensor>;

// Messages of a group, and those that a stream waits for right now.
struct Carrier {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::mutex lock;
  std::vector<c10::intrusive_ptr<c10d::Work>> waited;
  std::atomic<bool> aborted{false};
  const bool hangs = std::getenv("SIM_HANG") != nullptr;  // as nccl, which does not learn that a process is gone

  void wait(std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
    {
      std::lock_guard<std::mutex> guard(lock);
      if (aborted) return;
      waited.insert(waited.end(), works.begin(), works.end());
    }
    try {
      for (auto& w : works) w->wait();
    } catch (...) {
      failed();
    }
    std::lock_guard<std::mutex> guard(lock);
    for (auto& w : works) waited.erase(std::remove(waited.begin(), waited.end(), w), waited.end());
  }
  // In a `catch` block: raise the error of a message, or hang as nccl does until the group is aborted.
  void failed() {
    if (!aborted && !hangs) throw;
    while (!aborted) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  void abort() {
    std::lock_guard<std::mutex> guard(lock);
    aborted = true;
    for (auto& w : waited) w->abort();
  }
};

struct SimBackend final : c10d::Backend {
  SimBackend(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size, std::string name)
      : c10d::Backend(rank, size), carrier(std::make_shared<Carrier>()), name(std::move(name)), p2p_to(size, 0), p2p_from(size, 0) {
    carrier->backend = std::move(backend);
  }

  std::shared_ptr<Carrier> carrier;
  const std::string name;
  Stream* own = nullptr;
  int seq = 0;
  std::vector<int> p2p_to, p2p_from;
  bool coalescing = false, coalesced_async = true;
  std::vector<std::function<void()>> queued;
  std::vector<Xfer> queued_p2p;
  Tensors queued_keep;

  const std::string getBackendName() const override {
    return name;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return true;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return at::empty({size}, options.device(device0));
  }
  void setTimeout(std::chrono::milliseconds) override {}
  uint64_t getSequenceNumberForGroup() override {
    return seq;
  }
  int tag() {
    seq = (seq + 1) % (1 << 24);
    return seq;
  }
  static void carry(const std::shared_ptr<Carrier>& carrier, std::vector<Xfer>& all) {
    if (carrier->aborted) return;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (auto& x : all) {
      if (x.t.numel() == 0) continue;
      Tensors one{x.t};
      // Messages of other sizes never meet: such collectives hang, as nccl's do. gloo would end the process.
      const int tag = static_cast<int>((x.tag ^ (x.t.nbytes() * 2654435761u)) & 0x7fffffff);
      try {
        works.push_back(x.sends ? carrier->backend->send(one, x.peer, tag) : carrier->backend->recv(one, x.peer, tag));
      } catch (...) {
        carrier->failed();
      }
    }
    carrier->wait(works);
  }
  // As nccl: what the streams wait for ends without a result, and later collectives raise.
  void abort() override {
    carrier->abort();
  }
  c10::intrusive_ptr<c10d::Work> start(std::function<void()> task, bool async, Tensors keep, Tensors outputs) {
    TORCH_CHECK(!carrier->aborted, "the communicator was aborted");
    if (coalescing) {
      queued.push_back(std::move(task));
      coalesced_async = async;
      for (auto& t : keep) queued_keep.push_back(t);
      return c10::make_intrusive<SimWork>(std::make_shared<Flag>(), 0, Tensors{}, outputs);
    }
    Stream* on = current();
    if (async) {
      if (own == nullptr) own = new_stream();
      own->behind(on->mark());
      on = own;
    }
    on->push(std::move(task));
    if (!async) return nullptr;  // as nccl: whatever follows on the stream is behind it
    return c10::make_intrusive<SimWork>(on->mark(), on->id, std::move(keep), std::move(outputs));
  }
  void startCoalescing() override {
    coalescing = true;
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    coalescing = false;
    auto tasks = std::move(queued);
    auto p2p = std::move(queued_p2p);
    auto keep = std::move(queued_keep);
    queued.clear(), queued_p2p.clear(), queued_keep.clear();
    auto by = carrier;
    return start(
        [tasks, p2p, by]() mutable {
          for (auto& task : tasks) task();
          carry(by, p2p);
        },
        coalesced_async, keep, {});
  }
  static at::Tensor flat(const at::Tensor& t) {
    TORCH_CHECK(t.device().type() == kDev, "No backend type associated with device type ", t.device());
    TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
    return host_view(t).view({-1});
  }
  static void combine(at::Tensor& into, const at::Tensor& other, const c10d::ReduceOp& op) {
    switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        into.add_(other);
        break;
      case c10d::ReduceOp::MAX:
        into.copy_(at::maximum(into, other));
        break;
      case c10d::ReduceOp::MIN:
        into.copy_(at::minimum(into, other));
        break;
      case c10d::ReduceOp::PRODUCT:
        into.mul_(other);
        break;
      case c10d::ReduceOp::BAND:
        into.bitwise_and_(other);
        break;
      case c10d::ReduceOp::BOR:
        into.bitwise_or_(other);
        break;
      default:
        TORCH_CHECK(false, "this reduction is not there");
    }
  }
  // The sum of parts[r] in the order of the ranks.
  static at::Tensor combined(const Tensors& parts, const c10d::ReduceOp& op) {
    at::Tensor sum = parts[0].clone();
    for (size_t r = 1; r < parts.size(); r++) combine(sum, parts[r], op);
    if (static_cast<c10d::ReduceOp::RedOpType>(op) == c10d::ReduceOp::AVG) sum.div_(static_cast<double>(parts.size()));
    return sum;
  }
  std::function<void()> gathers(const at::Tensor& out, const at::Tensor& in) {
    at::Tensor o = flat(out), i = flat(in);
    TORCH_CHECK(o.numel() == i.numel() * size_ && o.scalar_type() == i.scalar_type(), "output tensor size must be equal to world_size times input tensor size");
    const int t = tag(), rank = rank_, size = size_;
    auto by = carrier;
    return [=]() mutable {
      std::vector<Xfer> all;
      const int64_t n = i.numel();
      if (n == 0) return;
      for (int r = 0; r < size; r++) {
        at::Tensor slot = o.narrow(0, r * n, n);
        if (r == rank) {
          if (slot.data_ptr() != i.data_ptr()) slot.copy_(i);
        } else {
          all.push_back({true, r, i, t});
          all.push_back({false, r, slot, t});
        }
      }
      carry(by, all);
    };
  }
  std::function<void()> scatters(const at::Tensor& out, const at::Tensor& in, c10d::ReduceOp op) {
    at::Tensor o = flat(out), i = flat(in);
    TORCH_CHECK(i.numel() == o.numel() * size_ && o.scalar_type() == i.scalar_type(), "input tensor must be the same size as output size times world size");
    const int t = tag(), rank = rank_, size = size_;
    auto by = carrier;
    return [=]() mutable {
      std::vector<Xfer> all;
      Tensors parts;
      const int64_t n = o.numel();
      if (n == 0) return;
      for (int r = 0; r < size; r++) {
        at::Tensor chunk = i.narrow(0, r * n, n);
        if (r == rank) {
          parts.push_back(chunk);
        } else {
          parts.push_back(at::empty_like(chunk));
          all.push_back({true, r, chunk, t});
          all.push_back({false, r, parts.back(), t});
        }
      }
      carry(by, all);
      o.copy_(combined(parts, op));
    };
  }
  std::function<void()> reduces(const at::Tensor& tensor, c10d::ReduceOp op, int root = -1) {
    at::Tensor x = flat(tensor);
    const int t = tag(), rank = rank_, size = size_;
    auto by = carrier;
    return [=]() mutable {
      std::vector<Xfer> all;
      Tensors parts;
      for (int r = 0; r < size; r++) {
        if (r == rank) {
          parts.push_back(x);
        } else {
          parts.push_back(at::empty_like(x));
          if (root < 0 || root == r) all.push_back({true, r, x, t});
          if (root < 0 || root == rank) all.push_back({false, r, parts.back(), t});
        }
      }
      carry(by, all);
      if (root < 0 || root == rank) x.copy_(combined(parts, op));
    };
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    std::vector<std::function<void()>> tasks;
    for (auto& tensor : tensors) {
      at::Tensor x = flat(tensor);
      const int t = tag(), rank = rank_, size = size_, root = static_cast<int>(opts.rootRank);
      auto by = carrier;
      tasks.push_back([=]() mutable {
        std::vector<Xfer> all;
        for (int r = 0; r < size; r++)
          if (rank == root && r != root) all.push_back({true, r, x, t});
        if (rank != root) all.push_back({false, root, x, t});
        carry(by, all);
      });
    }
    return start([tasks] { for (auto& task : tasks) task(); }, opts.asyncOp, tensors, tensors);
  }
  c10::intrusive_ptr<c10d::Work> several(std::vector<std::function<void()>> tasks, bool async, Tensors keep, Tensors outputs) {
    return start([tasks] { for (auto& task : tasks) task(); }, async, std::move(keep), std::move(outputs));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    std::vector<std::function<void()>> tasks;
    for (auto& t : tensors) tasks.push_back(reduces(t, opts.reduceOp));
    return several(tasks, opts.asyncOp, tensors, tensors);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    std::vector<std::function<void()>> tasks;
    for (auto& t : tensors) tasks.push_back(reduces(t, opts.reduceOp, static_cast<int>(opts.rootRank)));
    return several(tasks, opts.asyncOp, tensors, tensors);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& opts) override {
    return start(gathers(out, in), opts.asyncOp, {out, in}, {out});
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& opts) override {
    std::vector<std::function<void()>> tasks;
    for (size_t i = 0; i < outs.size(); i++) tasks.push_back(gathers(outs[i], ins[i]));
    Tensors keep(outs);
    keep.insert(keep.end(), ins.begin(), ins.end());
    return several(tasks, opts.asyncOp, keep, outs);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& opts) override {
    at::Tensor in = ins[0].contiguous();
    at::Tensor whole = at::empty({size_ * in.numel()}, in.options());
    std::vector<std::function<void()>> tasks{gathers(whole, in)};
    at::Tensor from = host_view(whole);
    Tensors into;
    for (auto& t : outs[0]) into.push_back(host_view(t));
    tasks.push_back([from, into]() mutable {
      int64_t at = 0;
      for (auto& t : into) {
        t.copy_(from.narrow(0, at, t.numel()).view(t.sizes()));
        at += t.numel();
      }
    });
    Tensors keep(outs[0]);
    keep.push_back(in), keep.push_back(whole);
    auto work = several(tasks, opts.asyncOp, keep, outs[0]);
    return work;
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& opts) override {
    return start(scatters(out, in, opts.reduceOp), opts.asyncOp, {out, in}, {out});
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& opts) override {
    std::vector<std::function<void()>> tasks;
    for (size_t i = 0; i < outs.size(); i++) tasks.push_back(scatters(outs[i], ins[i], opts.reduceOp));
    Tensors keep(outs);
    keep.insert(keep.end(), ins.begin(), ins.end());
    return several(tasks, opts.asyncOp, keep, outs);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                                              const c10d::AllToAllOptions& opts) override {
    at::Tensor o = flat(out), i = flat(in);
    const int t = tag(), rank = rank_, size = size_;
    const int64_t out_row = out.numel() / std::max<int64_t>(out.size(0), 1), in_row = in.numel() / std::max<int64_t>(in.size(0), 1);
    std::vector<int64_t> os, is;
    for (int r = 0; r < size; r++) {
      os.push_back(out_sizes.empty() ? o.numel() / size : out_sizes[r] * out_row);
      is.push_back(in_sizes.empty() ? i.numel() / size : in_sizes[r] * in_row);
    }
    auto by = carrier;
    auto task = [=]() mutable {
      std::vector<Xfer> all;
      int64_t a = 0, b = 0;
      for (int r = 0; r < size; r++) {
        at::Tensor slot = o.narrow(0, a, os[r]), part = i.narrow(0, b, is[r]);
        a += os[r], b += is[r];
        if (r == rank) {
          slot.copy_(part);
        } else {
          all.push_back({true, r, part, t});
          all.push_back({false, r, slot, t});
        }
      }
      carry(by, all);
    };
    return start(task, opts.asyncOp, {out, in}, {out});
  }
  c10::intrusive_ptr<c10d::Work> scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& opts) override {
    at::Tensor o = flat(outs[0]);
    const int t = tag(), rank = rank_, root = static_cast<int>(opts.rootRank), size = size_;
    Tensors parts, keep(outs);
    if (rank == root)
      for (auto& x : ins[0]) parts.push_back(flat(x)), keep.push_back(x);
    auto by = carrier;
    auto task = [=]() mutable {
      std::vector<Xfer> all;
      if (rank == root) {
        for (int r = 0; r < size; r++)
          if (r == rank)
            o.copy_(parts[r]);
          else
            all.push_back({true, r, parts[r], t});
      } else {
        all.push_back({false, root, o, t});
      }
      carry(by, all);
    };
    return start(task, opts.asyncOp, keep, outs);
  }
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int peer, int) override {
    const Xfer x{true, peer, flat(tensors[0]), (1 << 24) + p2p_to[peer]++};
    return point(x, tensors);
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int peer, int) override {
    const Xfer x{false, peer, flat(tensors[0]), (1 << 24) + p2p_from[peer]++};
    return point(x, tensors);
  }
  c10::intrusive_ptr<c10d::Work> point(const Xfer& x, Tensors& tensors) {
    if (coalescing) {
      queued_p2p.push_back(x);
      queued_keep.push_back(tensors[0]);
      coalesced_async = true;
      return c10::make_intrusive<SimWork>(std::make_shared<Flag>(), 0, Tensors{}, Tensors{});
    }
    auto by = carrier;
    std::vector<Xfer> all{x};
    return start([all, by]() mutable { carry(by, all); }, true, tensors, tensors);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override {
    at::Tensor one = at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(device0));
    auto work = start(reduces(one, c10d::ReduceOp::SUM), true, {one}, {one});
    static_cast<SimWork*>(work.get())->blocking = true;
    return work;
  }
};

// --- graphs ----------------------------------------------------------------------------------------------------------

static std::atomic<int64_t> pools{0};

static void begin_capture(int64_t pool) {
  std::lock_guard<std::recursive_mutex> lock(capture_mutex);
  TORCH_CHECK(active == nullptr, "sim device: another graph is captured");
  Stream* stream = current();
  TORCH_CHECK(stream->id != 0, "sim device: the stream that the device begins with cannot be captured");
  active = std::make_shared<Capture>();
  active->origin = stream->id, active->thread = std::this_thread::get_id(), active->pool = pool ? pool : ++pools;
  active->streams.insert(stream->id);
  stream->capture = active;
  capturing = true;
}

// Ends it, in any case. Raises if it was spoiled, or if work of a captured stream is not in front of the first one's end.
static CapturePtr end_capture() {
  std::unique_lock<std::recursive_mutex> lock(capture_mutex);
  TORCH_CHECK(active != nullptr, "sim device: no graph is captured");
  CapturePtr c = active;
  if (c->spoiled.empty() && current_id != c->origin) c->spoiled = "the capture ends on another stream than it began on";
  for (auto& [stream, tasks] : c->tasks)
    if (c->spoiled.empty() && c->seen[c->origin][stream] != tasks)
      c->spoiled = "stream " + std::to_string(stream) + " is not joined: the first stream did not wait for " +
          std::to_string(tasks - c->seen[c->origin][stream]) + " of its tasks";
  c->ended = true, active = nullptr, capturing = false;
  for (int64_t stream : c->streams) stream_of(stream)->capture = nullptr;
  lock.unlock();
  {
    std::lock_guard<std::mutex> inner(allocator.m);
    for (Block* block : c->later) allocator.release(block);
    c->later.clear();
  }
  TORCH_CHECK(c->spoiled.empty(), "sim device: the capture failed: ", c->spoiled);
  return c;
}

// Other streams than the captured ones: a graph is not ordered behind what these have to do.
static Stream* shadow_of(int64_t stream) {
  static std::map<int64_t, Stream*> shadows;
  std::lock_guard<std::recursive_mutex> lock(capture_mutex);
  Stream*& shadow = shadows[stream];
  if (shadow == nullptr) shadow = new_stream();
  shadow->slow_us = stream_of(stream)->slow_us.load();
  return shadow;
}

// Runs the graph behind the current stream, and what comes on the current stream behind the graph.
static void replay(const Capture& c) {
  check_host("a replay");
  allocator.check_alive(c);
  Stream* on = current();
  std::map<int64_t, Stream*> runs;
  const FlagPtr begin = on->mark();
  for (int64_t stream : c.streams) {
    runs[stream] = stream == c.origin ? on : shadow_of(stream);
    if (stream != c.origin) runs[stream]->behind(begin);
  }
  std::vector<FlagPtr> flags(c.flags);
  for (auto& op : c.ops) {
    Stream* stream = runs[op.stream];
    if (op.kind == Capture::kTask)
      stream->queue_now(op.task, op.kernel);
    else if (op.kind == Capture::kSet)
      flags[op.flag] = stream->mark();
    else
      stream->behind(flags[op.flag]);
  }
  for (auto& [id, stream] : runs)
    if (stream != on) on->behind(stream->mark());
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks);
  m.def("backend", [](const c10::intrusive_ptr<c10d::Backend>& carrier, int rank, int size, const std::string& name) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<sim::SimBackend>(carrier, rank, size, name);
  });
  m.def("delay", [](int64_t us, int64_t percent, int64_t seed) {
    sim::delay_us = us;
    sim::delay_percent = percent;
    sim::delay_seed = seed;
    sim::delays_told++;
  });
  m.def("slow", [](int64_t stream, int64_t us) { sim::stream_of(stream)->slow_us = us; });
  m.def("streams", [] {
    sim::stream_of(0);
    std::lock_guard<std::mutex> lock(sim::streams_mutex);
    return sim::streams.size();
  });
  m.def("behind", [] {  // tasks that each stream has still to do
    std::vector<int64_t> out;
    std::lock_guard<std::mutex> lock(sim::streams_mutex);
    for (auto* s : sim::streams) {
      std::lock_guard<std::mutex> inner(s->m);
      out.push_back(s->submitted - s->completed);
    }
    return out;
  });
  m.def("on_wait", [](py::object f) {
    delete sim::wait_callback;
    sim::wait_callback = f.is_none() ? nullptr : new py::object(f);
  });
  m.def("on_order", [](py::object f) {
    delete sim::order_callback;
    sim::order_callback = f.is_none() ? nullptr : new py::object(f);
  });
  m.def("waits", [] {
    std::lock_guard<std::mutex> lock(sim::stats_mutex);
    return sim::waits;
  });
  m.def("launches", [] {
    std::lock_guard<std::mutex> lock(sim::stats_mutex);
    return sim::launches;
  });
  m.def("reset", [] {
    std::lock_guard<std::mutex> lock(sim::stats_mutex);
    sim::waits.clear();
    sim::launches.clear();
  });
  m.def("failure", [] {
    std::lock_guard<std::mutex> lock(sim::error_mutex);
    return sim::sticky;
  });
  m.def("idle", [] {
    std::lock_guard<std::mutex> lock(sim::streams_mutex);
    for (auto* s : sim::streams)
      if (!s->idle()) return false;
    return true;
  });
  m.def("default_generator", [] { return sim::default_generator(); });
  pybind11::class_<sim::Capture, sim::CapturePtr>(m, "Graph")
      .def("replay", [](const sim::CapturePtr& c) { sim::replay(*c); })
      .def_readonly("pool", &sim::Capture::pool)
      .def_readonly("streams", &sim::Capture::streams)
      .def_property_readonly("tasks", [](const sim::Capture& c) { return c.tasks; });
  m.def("begin_capture", [](int64_t pool) { sim::begin_capture(pool); }, pybind11::arg("pool") = 0);
  m.def("end_capture", [] { return sim::end_capture(); });
  m.def("is_capturing", [] { return sim::current()->captured() != nullptr; });
}
