// Streams and events: queues whose operations run late, so that a wait that is missing shows.
// Owner: tests/cuda-sim (libcuda.so.1). Invariant: operations of a stream run in order; an event is done when its stream
// has done the operations up to its record.
#include "sim.h"
#include <algorithm>
#include <pthread.h>
#include <time.h>

namespace sim {
namespace {
std::mutex captures_mutex;
std::vector<std::shared_ptr<Capture>> captures;

size_t this_thread() { return size_t(pthread_self()); }

double now_ms() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

std::vector<std::shared_ptr<Stream>> all_streams(Context& context) {
    std::vector<std::shared_ptr<Stream>> all;
    auto& weak = context.streams;
    weak.erase(std::remove_if(weak.begin(), weak.end(), [](auto& w) { return w.expired(); }), weak.end());
    for (auto& w : weak)
        if (auto stream = w.lock()) all.push_back(stream);
    return all;
}

std::shared_ptr<Event> event_of(Context& context, CUhandle handle) {
    auto event = events().get(handle);
    return event && event->context == &context ? event : nullptr;
}
} // namespace

std::shared_ptr<Stream> stream_of(Context& context, CUhandle handle) {
    if (!handle) return context.null_stream;
    auto stream = streams().get(handle);
    return stream && stream->context == &context ? stream : nullptr;
}

CUresult enqueue(const std::shared_ptr<Stream>& stream, Op op) {
    if (stream->capture) {
        if (stream->capture->invalid) return CAPTURE_INVALIDATED;
        stream->capture->graph->ops.push_back(std::move(op));
        stream->captured++;
        return OK;
    }
    // The null stream and the streams that block wait for each other.
    Context& c = *stream->context;
    if (stream->blocking && stream != c.null_stream)
        if (CUresult code = run_until(*c.null_stream, c.null_stream->queued)) return code;
    stream->queue.push_back(std::move(op));
    stream->queued++;
    stream->asked = false;
    return settings().streams == 1 ? drain(*stream) : OK;
}

CUresult run_until(Stream& stream, uint64_t position) {
    Context& c = *stream.context;
    while (stream.done < position && !stream.queue.empty()) {
        Op op = std::move(stream.queue.front());
        stream.queue.pop_front();
        CUresult code = op.run(c);
        if (c.lost) return c.lost;
        stream.done++;
        if (code) return lose(c, code);
    }
    return c.lost;
}

CUresult drain(Stream& stream) {
    Context& c = *stream.context;
    for (auto& other : all_streams(c)) {
        bool before = settings().streams == 2 || (&stream == c.null_stream.get() && other->blocking);
        if (before && other.get() != &stream)
            if (CUresult code = run_until(*other, other->queued)) return code;
    }
    return run_until(stream, stream.queued);
}

CUresult drain_all(Context& context) {
    for (auto& stream : all_streams(context))
        if (CUresult code = run_until(*stream, stream->queued)) return code;
    return context.lost;
}

Stream::~Stream() {
    std::lock_guard<std::mutex> lock(captures_mutex);
    auto mine = [this](auto& capture) { return capture->origin == this; };
    captures.erase(std::remove_if(captures.begin(), captures.end(), mine), captures.end());
}

CUresult forbid_in_capture() {
    std::lock_guard<std::mutex> lock(captures_mutex);
    bool forbidden = false;
    for (auto& capture : captures) {
        bool mine = capture->thread == this_thread();
        if (mine ? capture->mode == 2 : capture->mode != 0) continue;
        capture->invalid = forbidden = true;
    }
    if (forbidden) report("a call that may wait or allocate, while a stream is captured");
    return forbidden ? CAPTURE_UNSUPPORTED : OK;
}

bool in_use(Context& context, cudasim_range host, std::string& by) {
    for (auto& stream : all_streams(context)) {
        for (const Op& op : stream->queue) {
            if (op.host.at >= host.at + host.bytes || host.at >= op.host.at + op.host.bytes) continue;
            by = op.what;
            return true;
        }
    }
    return false;
}
} // namespace sim

using namespace sim;

namespace {
CUresult make_stream(CUhandle* out, unsigned flags) {
    Here here;
    if (here.code) return here.code;
    if (flags > 1) return INVALID_VALUE;
    auto stream = std::make_shared<Stream>();
    stream->context = here.context.get();
    stream->blocking = flags == 0;
    here.context->streams.push_back(stream);
    *out = streams().add(stream);
    return OK;
}
} // namespace

EXPORT CUresult cuStreamCreate(CUhandle* out, unsigned flags) {
    ENTER("cuStreamCreate");
    return make_stream(out, flags);
}
EXPORT CUresult cuStreamCreateWithPriority(CUhandle* out, unsigned flags, int) {
    ENTER("cuStreamCreateWithPriority");
    return make_stream(out, flags);
}
EXPORT CUresult cuStreamDestroy_v2(CUhandle handle) {
    ENTER_CONTEXT("cuStreamDestroy");
    auto stream = handle ? stream_of(*here.context, handle) : nullptr;
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) stream->capture->invalid = true;
    CUresult code = run_until(*stream, stream->queued);
    streams().remove(handle);
    return code;
}
EXPORT CUresult cuStreamSynchronize(CUhandle handle) {
    ENTER_CONTEXT("cuStreamSynchronize");
    auto stream = stream_of(*here.context, handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_UNSUPPORTED;
    if (CUresult code = drain(*stream)) return code;
    return check_zones(*here.context, "cuStreamSynchronize");
}
EXPORT CUresult cuCtxSynchronize() {
    ENTER_CONTEXT("cuCtxSynchronize");
    if (CUresult code = forbid_in_capture()) return code;
    if (CUresult code = drain_all(*here.context)) return code;
    return check_zones(*here.context, "cuCtxSynchronize");
}
// Not ready the first time it is asked.
EXPORT CUresult cuStreamQuery(CUhandle handle) {
    ENTER_CONTEXT("cuStreamQuery");
    auto stream = stream_of(*here.context, handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_UNSUPPORTED;
    if (stream->done == stream->queued) return OK;
    if (!stream->asked) return stream->asked = true, NOT_READY;
    return drain(*stream);
}
EXPORT CUresult cuStreamWaitEvent(CUhandle handle, CUhandle event_handle, unsigned) {
    ENTER_CONTEXT("cuStreamWaitEvent");
    auto stream = stream_of(*here.context, handle);
    auto event = event_of(*here.context, event_handle);
    if (!stream || !event) return INVALID_HANDLE;
    if (auto capture = event->capture) {
        if (stream->capture && stream->capture != capture) return stream->capture->invalid = true, CAPTURE_ISOLATION;
        if (event->stream->capture != capture) return CAPTURED_EVENT; // that capture has ended
        if (!stream->capture) {
            if (stream->done != stream->queued || stream == here.context->null_stream) return CAPTURE_ISOLATION;
            stream->capture = capture;
            stream->captured = stream->joined = 0;
        }
        if (capture->origin == stream.get()) event->stream->joined = event->captured;
        return OK;
    }
    if (!event->recorded) return OK;
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_ISOLATION;
    auto source = event->stream;
    uint64_t position = event->position;
    return enqueue(stream, {"wait", [=](Context&) { return run_until(*source, position); }});
}

EXPORT CUresult cuStreamBeginCapture_v2(CUhandle handle, int mode) {
    ENTER_CONTEXT("cuStreamBeginCapture");
    auto stream = handle ? stream_of(*here.context, handle) : nullptr;
    if (!stream) return handle ? INVALID_HANDLE : CAPTURE_UNSUPPORTED;
    if (mode < 0 || mode > 2) return INVALID_VALUE;
    if (stream->capture) return 401;
    auto graph = std::make_shared<Graph>();
    graph->context = here.context.get();
    auto capture = std::make_shared<Capture>(Capture{graph, stream.get(), mode, this_thread()});
    stream->capture = capture;
    stream->captured = stream->joined = 0;
    std::lock_guard<std::mutex> lock(captures_mutex);
    captures.push_back(capture);
    return OK;
}
EXPORT CUresult cuStreamEndCapture(CUhandle handle, CUhandle* out) {
    ENTER_CONTEXT("cuStreamEndCapture");
    *out = nullptr;
    auto stream = stream_of(*here.context, handle);
    if (!stream) return INVALID_HANDLE;
    auto capture = stream->capture;
    if (!capture) return 401;
    if (capture->origin != stream.get()) return capture->invalid = true, CAPTURE_UNMATCHED;
    if (capture->mode != 2 && capture->thread != this_thread()) return CAPTURE_WRONG_THREAD;
    bool joined = true;
    for (auto& other : all_streams(*here.context)) {
        if (other->capture != capture) continue;
        joined &= other == stream || other->joined == other->captured;
        other->capture = nullptr;
    }
    {
        std::lock_guard<std::mutex> lock(captures_mutex);
        captures.erase(std::remove(captures.begin(), captures.end(), capture), captures.end());
    }
    if (capture->invalid) return CAPTURE_INVALIDATED;
    if (!joined) return CAPTURE_UNJOINED;
    *out = graphs().add(capture->graph);
    return OK;
}
EXPORT CUresult cuStreamIsCapturing(CUhandle handle, int* status) {
    ENTER_CONTEXT("cuStreamIsCapturing");
    auto stream = stream_of(*here.context, handle);
    if (!stream) return INVALID_HANDLE;
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return OK;
}
EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER_CONTEXT("cuCtxGetStreamPriorityRange");
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return OK;
}

EXPORT CUresult cuEventCreate(CUhandle* out, unsigned flags) {
    ENTER_CONTEXT("cuEventCreate");
    auto event = std::make_shared<Event>();
    event->context = here.context.get();
    event->timing = !(flags & 2);
    *out = events().add(event);
    return OK;
}
EXPORT CUresult cuEventDestroy_v2(CUhandle handle) {
    ENTER_CONTEXT("cuEventDestroy");
    if (!event_of(*here.context, handle)) return INVALID_HANDLE;
    events().remove(handle);
    return OK;
}
EXPORT CUresult cuEventRecord(CUhandle handle, CUhandle stream_handle) {
    ENTER_CONTEXT("cuEventRecord");
    auto event = event_of(*here.context, handle);
    auto stream = stream_of(*here.context, stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    event->stream = stream;
    event->capture = stream->capture;
    event->captured = stream->captured;
    event->recorded = !stream->capture;
    event->asked = false;
    if (stream->capture) return stream->capture->invalid ? CAPTURE_INVALIDATED : OK;
    uint64_t position = event->position = stream->queued + 1;
    return enqueue(stream, {"record", [=](Context&) -> CUresult {
                                if (event->position == position) event->time = now_ms();
                                return OK;
                            }});
}

namespace {
// Done, or OK to wait for: an event that was never recorded counts as done.
bool is_done(const Event& event) { return !event.recorded || event.stream->done >= event.position; }
} // namespace

// Not ready the first time it is asked.
EXPORT CUresult cuEventQuery(CUhandle handle) {
    ENTER_CONTEXT("cuEventQuery");
    auto event = event_of(*here.context, handle);
    if (!event) return INVALID_HANDLE;
    if (CUresult code = forbid_in_capture()) return code;
    if (event->capture) return CAPTURED_EVENT;
    if (is_done(*event)) return OK;
    if (!event->asked) return event->asked = true, NOT_READY;
    return run_until(*event->stream, event->position);
}
EXPORT CUresult cuEventSynchronize(CUhandle handle) {
    ENTER_CONTEXT("cuEventSynchronize");
    auto event = event_of(*here.context, handle);
    if (!event) return INVALID_HANDLE;
    if (event->capture) return event->capture->invalid = true, CAPTURED_EVENT;
    if (!is_done(*event))
        if (CUresult code = settings().streams == 2 ? drain_all(*here.context)
                                                    : run_until(*event->stream, event->position))
            return code;
    return check_zones(*here.context, "cuEventSynchronize");
}

namespace {
CUresult elapsed(float* out, CUhandle start_handle, CUhandle end_handle) {
    Here here;
    if (here.code) return here.code;
    auto start = event_of(*here.context, start_handle), end = event_of(*here.context, end_handle);
    if (!start || !end || !start->timing || !end->timing || !start->recorded || !end->recorded) return INVALID_HANDLE;
    if (!is_done(*start) || !is_done(*end)) return NOT_READY;
    *out = float(end->time - start->time);
    return OK;
}
} // namespace
EXPORT CUresult cuEventElapsedTime(float* out, CUhandle start, CUhandle end) {
    ENTER("cuEventElapsedTime");
    return elapsed(out, start, end);
}
EXPORT CUresult cuEventElapsedTime_v2(float* out, CUhandle start, CUhandle end) {
    ENTER("cuEventElapsedTime");
    return elapsed(out, start, end);
}
