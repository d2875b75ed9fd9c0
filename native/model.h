// The two programs of a model and everything a step needs beside them, allocated once.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "profile.h"
#include "sampler.h"

namespace octavo {

class Model {
public:
    // `input` and `logits` are offsets into the head's arena, `hidden` into the body's.
    Model(std::shared_ptr<Pool> pool, std::shared_ptr<KVCache> cache, std::shared_ptr<Program> body,
          std::shared_ptr<Program> head, int64_t hidden, int64_t input, int64_t logits, int width, int vocab,
          int max_tokens, int head_rows);

    int vocab() const { return vocab_; }

    // Computes the step; its rows then go through the head, `head_rows` at a time, and each is drawn to `drawn` by
    // `sampling` (when not null) or copied to `out`. Throws std::invalid_argument on a block id out of range.
    void run(const Step& step, const Sampling* sampling, const Drawn& drawn, float* out);

    // Steps are timed from here on; the profile so far is forgotten.
    void start_profile();
    // What was timed; steps are not timed any more.
    Profile stop_profile();

    size_t bytes() const { return body_->bytes() + head_->bytes(); }

private:
    void prepare();
    // The parts of a step that every worker of a job must call: rows [first, first + rows) of the head's input, and of
    // what the head has made of it.
    void fill_head(int first, int rows, int worker);
    void draw(int first, int rows, int worker, const Sampling* sampling, const Drawn& drawn, float* out);
    void run_timed(const Sampling* sampling, const Drawn& drawn, float* out);
    void check_blocks() const;

    std::shared_ptr<Pool> pool_;
    std::shared_ptr<KVCache> cache_;
    std::shared_ptr<Program> body_;
    std::shared_ptr<Program> head_;
    int64_t hidden_;
    int64_t input_;
    int64_t logits_;
    int width_;
    int vocab_;
    int head_rows_;
    Batch batch_;
    std::vector<SamplerScratch> scratch_;
    std::mutex mutex_;
    std::unique_ptr<Profile> profile_;  // while steps are timed
};

}  // namespace octavo
