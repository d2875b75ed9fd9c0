#include "model.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace octavo {

Model::Model(std::shared_ptr<Pool> pool, std::shared_ptr<KVCache> cache, std::shared_ptr<Program> body,
             std::shared_ptr<Program> head, int64_t hidden, int64_t input, int64_t logits, int width, int vocab,
             int max_tokens, int head_rows)
    : pool_(std::move(pool)),
      cache_(std::move(cache)),
      body_(std::move(body)),
      head_(std::move(head)),
      hidden_(hidden),
      input_(input),
      logits_(logits),
      width_(width),
      vocab_(vocab),
      head_rows_(head_rows),
      scratch_(pool_->threads()) {
    body_->reserve_scratch();
    head_->reserve_scratch();
    batch_.owner.resize(max_tokens);
    for (const HeadShape& shape : body_->attend_shapes()) {
        batch_.attend.push_back(make_attend_plan(shape, max_tokens, pool_->threads()));
    }
    for (SamplerScratch& scratch : scratch_) {
        scratch.scores.resize(vocab);
        scratch.mass.resize(vocab);
        scratch.ids.resize(vocab);
        scratch.edge.resize(vocab);
    }
}

void Model::prepare() {
    for (int s = 0; s < batch_.sequences; ++s) {
        std::fill(batch_.owner.begin() + batch_.starts[s], batch_.owner.begin() + batch_.starts[s + 1], s);
    }
    for (AttendPlan& plan : batch_.attend) plan_attention(batch_, pool_->threads(), body_->partial_floats(), plan);
}

// Every block that attention will read. The blocks written are a part of them, but for windows behind the step.
void Model::check_blocks() const {
    int checked_group = -1;
    HeadShape checked{};
    for (const Instruction& i : body_->instructions()) {
        const bool same =
            i.group == checked_group && i.shape.window == checked.window && i.shape.chunk == checked.chunk;
        if (i.op != Op::Attend || same) continue;
        checked_group = i.group;
        checked = i.shape;
        const BlockTable& table = batch_.tables[i.group];
        const int blocks = cache_->blocks[i.group];
        for (int s = 0; s < batch_.sequences; ++s) {
            const int first = batch_.positions[batch_.starts[s]];
            const int last = batch_.positions[batch_.starts[s + 1] - 1];
            const int begin = attend_begin(i.shape, first);
            const int32_t* ids = table.ids + batch_.slots[s] * table.columns;
            for (int b = begin / cache_->block_size; b <= last / cache_->block_size; ++b) {
                if (ids[b] >= 0 && ids[b] < blocks) continue;
                throw std::invalid_argument("tables[" + std::to_string(i.group) + "]: block " + std::to_string(ids[b]) +
                                            " of slot " + std::to_string(batch_.slots[s]) + " is not in [0, " +
                                            std::to_string(blocks) + ")");
            }
        }
    }
}

void Model::fill_head(int first, int rows, int worker) {
    float* input = reinterpret_cast<float*>(head_->arena() + input_);
    const float* hidden = reinterpret_cast<const float*>(body_->arena() + hidden_);
    pool_->each(rows, worker, [&](int r, int) {
        std::memcpy(input + int64_t{r} * width_, hidden + int64_t{first + r} * width_, sizeof(float) * width_);
    });
}

void Model::draw(int first, int rows, int worker, const Sampling* sampling, const Drawn& drawn, float* out) {
    const float* logits = reinterpret_cast<const float*>(head_->arena() + logits_);
    const Kernels& table = kernels();
    pool_->each(rows, worker, [&](int r, int) {
        const float* row = logits + int64_t{r} * vocab_;
        if (sampling != nullptr) {
            draw_row(table, row, vocab_, *sampling, first + r, scratch_[worker], drawn);
        } else {
            std::memcpy(out + int64_t{first + r} * vocab_, row, sizeof(float) * vocab_);
        }
    });
}

void Model::run(const Step& step, const Sampling* sampling, const Drawn& drawn, float* out) {
    const std::lock_guard<std::mutex> one_step_at_a_time(mutex_);
    static_cast<Step&>(batch_) = step;
    check_blocks();
    if (profile_) return run_timed(sampling, drawn, out);
    prepare();
    pool_->run([&](int worker) {
        if (batch_.tokens_count > 0) body_->run(batch_, batch_.tokens_count, worker);
        for (int first = 0; first < batch_.rows_count; first += head_rows_) {
            const int rows = std::min(head_rows_, batch_.rows_count - first);
            fill_head(first, rows, worker);
            head_->run(batch_, rows, worker);
            draw(first, rows, worker, sampling, drawn, out);
        }
    });
}

// A copy of `run` with a clock, so that a step that is not timed does not ask whether it is.
void Model::run_timed(const Sampling* sampling, const Drawn& drawn, float* out) {
    using Clock = std::chrono::steady_clock;
    Profile::Times& times = profile_->of(batch_);
    const auto since = [](Clock::time_point began) {
        return std::chrono::duration<double>(Clock::now() - began).count();
    };
    Clock::time_point began = Clock::now();
    prepare();
    OpTime& planning = times["plan"];
    planning.seconds += since(began);
    ++planning.calls;
    OpTime& sampled = times["sampling"];
    Laps laps;
    if (batch_.tokens_count > 0) {
        pool_->run([&](int worker) { body_->run_timed(batch_, batch_.tokens_count, worker, laps); });
        Profile::add(*body_, batch_, batch_.tokens_count, laps, times);
    }
    for (int first = 0; first < batch_.rows_count; first += head_rows_) {
        const int rows = std::min(head_rows_, batch_.rows_count - first);
        pool_->run([&](int worker) {
            fill_head(first, rows, worker);
            head_->run_timed(batch_, rows, worker, laps);
        });
        Profile::add(*head_, batch_, rows, laps, times);
        began = Clock::now();
        pool_->run([&](int worker) { draw(first, rows, worker, sampling, drawn, out); });
        sampled.seconds += since(began);
        ++sampled.calls;
    }
}

void Model::start_profile() {
    const std::lock_guard<std::mutex> one_step_at_a_time(mutex_);
    profile_ = std::make_unique<Profile>();
}

Profile Model::stop_profile() {
    const std::lock_guard<std::mutex> one_step_at_a_time(mutex_);
    const std::unique_ptr<Profile> stopped = std::move(profile_);
    return stopped ? std::move(*stopped) : Profile{};
}

}  // namespace octavo
