// A recorded body or head: a flat list of instructions over an arena of activations. Offsets were planned when it was
// recorded; only the number of rows changes from step to step.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attend_plan.h"
#include "experts.h"
#include "kernels.h"
#include "kv_cache.h"
#include "pack.h"
#include "pool.h"

namespace octavo {

constexpr int kRowBlock = 128;  // rows of a work item of a matrix product
constexpr int kMostRun = 16;    // rows at most that a worker takes in a row, of ops that make one at a time

inline int count_blocks(int n, int size) { return (n + size - 1) / size; }

enum class Op {
    Embed,
    EmbedPositions,
    Rotary,
    Norm,
    Activate,
    Add,
    Blend,
    Mix,
    MatchRms,
    KeepTop,
    Reorder,
    Pack,
    Experts,
    Headwise,
    Linear,
    Gated,
    StoreKV,
    StoreLatent,
    Attend,
    Gather,
    Logits
};

// How a part of a weight takes its input.
enum Form : int { FORM_FLOAT, FORM_INT8, FORM_INT16, FORM_BFLOAT16, FORM_COUNT };

// Columns of a product that one work item computes: panels of one part.
struct Tile {
    int part;
    int panel;
    int panels;
    int column;
    int columns;
};

constexpr int64_t kNone = -1;

// A weight as a product takes it.
struct Factor {
    std::shared_ptr<Weight> weight;
    std::vector<int> forms;        // of each part
    std::vector<Tile> tiles;       // of a gated product: of the gate, with the columns of the result
    std::vector<int> starts;       // tiles [starts[n], starts[n + 1]) are of panels that node n owns
    std::vector<int32_t> columns;  // of an expert: element j of its input is columns[j] of the row; empty: it is j
};

// An activation in the arena.
struct Place {
    const int64_t* at;  // offset of each form
    int width;
    int64_t rows;
};

// What follows x @ weight^T: scale * (. + bias) + residual, then the cap. Offsets as in Instruction.
struct LinearEnd {
    const float* bias;
    float scale;
    int64_t residual;
    float softcap;
    int64_t out;
    int out_width;
};

// A mixture of experts: the two products of each, and where the rows of a pass are, one per pair of a row and an
// expert.
struct Mixture {
    Router router{};
    std::vector<float> correction;
    std::vector<Factor> gate_up;  // each with as many tiles of a node as any other, of which some may have no columns
    std::vector<Factor> down;     // as gate_up
    std::vector<float> gate_up_bias;
    std::vector<float> down_bias;
    int inner = 0;
    bool reordered = false;  // whether any of `down` has columns: `hidden` then has its floats
    int pass_rows = 0;
    int64_t logits = kNone;
    int64_t given[FORM_COUNT] = {kNone, kNone, kNone, kNone};   // inputs
    int64_t hidden[FORM_COUNT] = {kNone, kNone, kNone, kNone};  // gated products
    int64_t results = kNone;
};

// A norm of heads with its weight, which is empty where there is none.
struct OwnedNorm {
    HeadNorm norm{};
    std::vector<float> weight;
};

// One instruction; an op uses the fields it needs. Offsets are bytes into the arena.
struct Instruction {
    Op op;
    int64_t in[FORM_COUNT] = {kNone, kNone, kNone, kNone};  // the input in each form
    int64_t residual = kNone;
    int64_t rotary = kNone;
    // The factor of activate, the other summand, the row to be like, the gate of blend, the coefficients of mix.
    int64_t other = kNone;
    std::vector<int64_t> streams;  // mix; store_latent: q_latent, q_rope, latent, k_rope
    int64_t out[FORM_COUNT] = {kNone, kNone, kNone, kNone};
    int width = 0;  // of the input
    int out_width = 0;
    float scale = 1;       // embed, add, linear, logits
    float deviations = 0;  // keep_top
    float eps = 0;         // norm, match_rms
    bool center = false;
    float softcap = 0;  // logits
    int activation = SILU;
    float limit = 0;      // gated
    int offset = 0;       // embed_positions: first row; mix: first coefficient
    int other_width = 0;  // mix: of the coefficients
    int heads = 1;        // headwise
    Factor factor;
    std::shared_ptr<const Mixture> mixture;
    // Weight of a norm, bias of a product, inverse frequencies, parameters of activate, sinks.
    std::vector<float> first;
    std::vector<float> second;     // bias of a norm, slopes of attend
    std::vector<int32_t> columns;  // reorder
    OwnedNorm norms[3];            // of q, k and v
    HeadShape shape{};
    int layer = 0;
    int group = 0;
    int plan = 0;  // attend: which of the step's plans
};

struct BlockTable {
    const int32_t* ids;
    int64_t columns;
};

// A step as the caller gives it; see BatchArrays in octavo/ops/contract.py.
struct Step {
    int tokens_count = 0;
    int sequences = 0;
    int rows_count = 0;
    const int32_t* tokens = nullptr;
    const int32_t* positions = nullptr;
    const int32_t* starts = nullptr;
    const int32_t* slots = nullptr;
    const int32_t* rows = nullptr;
    std::vector<BlockTable> tables;
};

// A step with what is derived from it.
struct Batch : Step {
    std::vector<int32_t> owner;      // [tokens]: sequence of each
    std::vector<AttendPlan> attend;  // one per shape in Program::attend_shapes
};

// What each instruction of a run took, on the clock of worker 0, and what experts read.
struct Laps {
    std::vector<double> seconds;
    std::vector<int64_t> expert_bytes;
};

class Program {
public:
    Program(std::shared_ptr<Pool> pool, std::shared_ptr<KVCache> cache, int64_t arena_bytes);

    void add(Instruction instruction);
    // Runs everything for `rows` rows; every worker of a pool job must call it.
    void run(const Batch& batch, int rows, int worker);
    // The same, and worker 0 fills `laps`.
    void run_timed(const Batch& batch, int rows, int worker, Laps& laps);

    uint8_t* arena() const { return arena_.data(); }
    size_t bytes() const;
    const std::vector<Instruction>& instructions() const { return instructions_; }
    const std::vector<HeadShape>& attend_shapes() const { return attend_shapes_; }
    int64_t block_bytes() const { return cache_->block_bytes; }
    int64_t partial_floats() const { return partials_.size() / sizeof(float); }
    void reserve_scratch();

private:
    struct Context {
        const Batch& batch;
        int rows;
        int worker;
        bool alone = false;  // all of the work is this worker's
    };

    float* floats(int64_t offset, int64_t row = 0, int width = 0) const {
        return reinterpret_cast<float*>(arena_.data() + offset) + row * width;
    }
    const float* maybe(int64_t offset, int64_t row, int width) const {
        return offset == kNone ? nullptr : floats(offset, row, width);
    }
    float* scratch(int worker) const { return scratch_of_[worker]; }
    Act8 act8(int64_t offset, int width, int64_t rows) const;
    Act16 act16(int64_t offset, int width, int64_t rows) const;

    // This worker's share of an instruction, which a barrier has to end.
    void step(const Instruction& i, const Context& c);
    // row(out) makes row r, in its float form or in scratch where there is none; the integer forms are made of it while
    // it is in the cache.
    template <class Row>
    void make_row(const Place& place, int64_t r, int worker, const Row& row) const {
        const bool kept = place.at[FORM_FLOAT] != kNone;
        float* out = kept ? floats(place.at[FORM_FLOAT], r, place.width) : scratch(worker) + kFloatScratch;
        row(out);
        pack_row(place, out, r);
    }
    // Neighbouring rows lie in the same cache lines: of packed activations, and of a block's keys. A worker takes some
    // in a row, so that workers do not pull these lines from each other.
    template <class Run>
    void each_run(int rows, const Context& c, const Run& run) {
        if (c.alone) {
            run(0, rows);
            return;
        }
        const int length = std::clamp(rows / (2 * pool_->threads()), 1, kMostRun);
        pool_->share(count_blocks(rows, length),
                     [&](int item) { run(item * length, std::min(rows, item * length + length)); });
    }
    template <class Row>
    void each_row(int rows, const Context& c, const Row& row) {
        each_run(rows, c, [&](int first, int end) {
            for (int r = first; r < end; ++r) row(r);
        });
    }
    template <class Row>
    void each_row(const Place& place, const Context& c, const Row& row) {
        each_row(static_cast<int>(place.rows), c,
                 [&](int r) { make_row(place, r, c.worker, [&](float* out) { row(r, out); }); });
    }
    void mix_row(const Instruction& i, int row, float* out) const;
    void pack_row(const Place& place, const float* x, int64_t row) const;
    void embed_row(const Instruction& i, int32_t id, float* out, float* buffer) const;
    void rotary_row(const Instruction& i, int32_t position, float* out) const;
    void product(const Factor& factor, const Place& x, int part, int panel, int panels, int row, int rows, float* out,
                 int64_t stride, float* buffer) const;
    void headwise_tile(const Instruction& i, const Tile& tile, int row, int rows, float* buffer) const;
    void linear_tile(const Factor& factor, const Place& x, const Tile& tile, int row, int rows, const LinearEnd& end,
                     float* buffer) const;
    // `bias` is that of all gate and up columns, or null.
    void gated_tile(const Factor& factor, const Place& x, const Place& out, const Tile& tile, int row, int rows,
                    const float* bias, int activation, float limit, float* buffer) const;
    void gather_columns(const Factor& factor, const Place& x, int column, int columns, int row, int rows, float* out,
                        float* buffer) const;
    void mixture(const Instruction& i, const Context& c);
    int64_t expert_bytes(const Instruction& i, int rows) const;
    void mixture_pass(const Instruction& i, const Context& c, int first, int rows);
    int lot_begin(const Context& c, int row) const;
    void store_run(const Instruction& i, const Context& c, int row, int end, float* buffer) const;
    AttendItem attend_work(const Instruction& i, const Context& c, int item, float* buffer) const;
    void attend_item(const Instruction& i, const Context& c, int item, float* buffer) const;

    std::shared_ptr<Pool> pool_;
    std::shared_ptr<KVCache> cache_;
    const Kernels& kernels_;
    Arena arena_;
    std::vector<Arena> scratch_;      // of the workers of each node, which are the first to write there
    std::vector<float*> scratch_of_;  // each worker's
    Arena partials_;                  // of contexts that several workers share
    int64_t scratch_floats_;
    std::vector<Instruction> instructions_;
    Routes routes_;
    std::vector<HeadShape> attend_shapes_;  // as far as they differ in how a step is cut
};

}  // namespace octavo
