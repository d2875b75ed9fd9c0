#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

namespace octavo {

namespace {

constexpr int kWide = kTileColumns + kColumns;  // columns of 32 that do not start at a panel touch five panels
// A worker's buffers for a matrix product: unpacked weights, then up to three results.
constexpr int64_t kProductScratch = kFloatScratch + int64_t{3} * kRowBlock * kWide;
// Room for partials: a decode with this much context can be shared. What is not used takes no memory.
constexpr int kSharedTokens = 128 << 10;
constexpr int kBriefRows = 1;  // that one worker sees to while the others wait

// Adds the tiles of columns [first, end), which begin at a panel.
void add_tiles(const Weight& weight, int first, int end, std::vector<Tile>& tiles) {
    for (size_t part = 0; part < weight.parts.size(); ++part) {
        const int from = std::max(first - weight.first[part], 0);
        const int to = std::min(end - weight.first[part], weight.parts[part].n_out);
        for (int column = from; column < to; column += kTileColumns) {
            const int columns = std::min(kTileColumns, to - column);
            tiles.push_back({static_cast<int>(part), column / kColumns, (columns + kColumns - 1) / kColumns,
                             weight.first[part] + column, columns});
        }
    }
}

// Puts the tiles of a node's panels together.
void sort_tiles(const Pool& pool, Factor& factor) {
    const auto node = [&](const Tile& tile) { return std::min(factor.weight->node[tile.part], pool.nodes() - 1); };
    std::stable_sort(factor.tiles.begin(), factor.tiles.end(),
                     [&](const Tile& a, const Tile& b) { return node(a) < node(b); });
    factor.starts.assign(pool.nodes() + 1, 0);
    for (const Tile& tile : factor.tiles) ++factor.starts[node(tile) + 1];
    std::partial_sum(factor.starts.begin(), factor.starts.end(), factor.starts.begin());
}

// What a work item computes lies within one head (of 1, but for headwise products).
void cut(const Pool& pool, int heads, Factor& factor) {
    const int columns = factor.weight->n_out / heads;
    for (int head = 0; head < heads; ++head) {
        add_tiles(*factor.weight, head * columns, (head + 1) * columns, factor.tiles);
    }
    sort_tiles(pool, factor);
}

// The columns of the result by 32. Where the gate begins at a panel and the other half is a matrix like it, both have
// the same owner.
void cut_gated(const Pool& pool, Factor& factor) {
    const Weight& weight = *factor.weight;
    const int inner = weight.n_out / 2;
    int part = 0;
    for (int column = 0; column < inner; column += kTileColumns) {
        while (column >= weight.first[part] + weight.parts[part].n_out) ++part;
        const int columns = std::min(kTileColumns, inner - column);
        const int panel = (column - weight.first[part]) / kColumns;
        factor.tiles.push_back({part, panel, count_blocks(columns, kColumns), column, columns});
    }
    sort_tiles(pool, factor);
}

// Experts may be made of different parts. All get as many tiles of a node as that with the most; those that one does
// not have, have no columns.
void even_out(std::vector<Factor>& experts) {
    std::vector<int> most(experts.front().starts.size());
    for (const Factor& factor : experts) {
        for (size_t node = 1; node < most.size(); ++node) {
            most[node] = std::max(most[node], factor.starts[node] - factor.starts[node - 1]);
        }
    }
    std::partial_sum(most.begin(), most.end(), most.begin());
    for (Factor& factor : experts) {
        std::vector<Tile> tiles(most.back());
        for (size_t node = 0; node + 1 < most.size(); ++node) {
            std::copy(factor.tiles.begin() + factor.starts[node], factor.tiles.begin() + factor.starts[node + 1],
                      tiles.begin() + most[node]);
        }
        factor.tiles = std::move(tiles);
        factor.starts = most;
    }
}

const float* some(const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); }

// Whether an instruction is done sooner by the worker that ends the phase before than in a phase of its own, in which
// the others would wait as long, and for each other once more.
bool is_brief(const Instruction& i, int rows) {
    switch (i.op) {
        case Op::Experts:
        case Op::Headwise:
        case Op::Linear:
        case Op::Gated:
        case Op::Attend:
        case Op::Logits:
            return false;
        default:
            return rows <= kBriefRows;
    }
}

Act8 from_group(const Act8& x, int64_t group) {
    const int64_t skipped = group * x.rows;
    return {x.q + skipped * kCell, x.scale + skipped, x.sum + skipped, x.halves + skipped, x.rows};
}

}  // namespace

Program::Program(std::shared_ptr<Pool> pool, std::shared_ptr<KVCache> cache, int64_t arena_bytes)
    : pool_(std::move(pool)),
      cache_(std::move(cache)),
      kernels_(octavo::kernels()),
      arena_(arena_bytes),
      scratch_floats_(kProductScratch) {}

void Program::add(Instruction instruction) {
    const bool embeds = instruction.op == Op::Embed || instruction.op == Op::EmbedPositions;
    Factor& factor = instruction.factor;
    if (instruction.op == Op::Gated) {
        cut_gated(*pool_, factor);
    } else if (factor.weight && !embeds) {
        cut(*pool_, instruction.heads, factor);
    }
    if (!factor.weight || embeds) {  // a row that only its integer forms are made of
        scratch_floats_ = std::max<int64_t>(scratch_floats_, kFloatScratch + instruction.out_width);
    }
    if (instruction.op == Op::Experts) {
        auto mixture = std::make_shared<Mixture>(*instruction.mixture);
        for (Factor& gate_up : mixture->gate_up) cut_gated(*pool_, gate_up);
        for (Factor& down : mixture->down) cut(*pool_, 1, down);
        even_out(mixture->gate_up);
        even_out(mixture->down);
        const Router& router = mixture->router;
        routes_.reserve(mixture->pass_rows * router.top_k, router.experts);
        const int row = mixture->reordered ? std::max(instruction.width, mixture->inner) : instruction.width;
        scratch_floats_ = std::max({scratch_floats_, int64_t{kFloatScratch} + row, route_scratch(router)});
        instruction.mixture = std::move(mixture);
    }
    if (instruction.op == Op::StoreKV || instruction.op == Op::StoreLatent) {
        const HeadShape& shape = instruction.shape;
        scratch_floats_ = std::max(scratch_floats_, store_scratch(shape));
    }
    if (instruction.op == Op::Attend) {
        const auto cut_alike = [&](const HeadShape& shape) {
            const HeadShape& own = instruction.shape;
            return shape.heads == own.heads && shape.kv_heads == own.kv_heads && shape.head_dim == own.head_dim &&
                   shape.latent == own.latent && shape.window == own.window && shape.chunk == own.chunk;
        };
        const auto found = std::find_if(attend_shapes_.begin(), attend_shapes_.end(), cut_alike);
        instruction.plan = static_cast<int>(found - attend_shapes_.begin());
        if (found == attend_shapes_.end()) attend_shapes_.push_back(instruction.shape);
        scratch_floats_ = std::max(scratch_floats_, attend_scratch(instruction.shape));
    }
    instructions_.push_back(std::move(instruction));
}

void Program::reserve_scratch() {
    scratch_floats_ = (scratch_floats_ + 31) / 32 * 32;  // workers share no cache line
    scratch_.clear();
    scratch_of_.assign(pool_->threads(), nullptr);
    for (int node = 0; node < pool_->nodes(); ++node) {
        scratch_.emplace_back(scratch_floats_ * sizeof(float) * pool_->workers(node));
        float* next = reinterpret_cast<float*>(scratch_.back().data());
        for (int worker = 0; worker < pool_->threads(); ++worker) {
            if (pool_->node_of(worker) != node) continue;
            scratch_of_[worker] = next;
            next += scratch_floats_;
        }
    }
    if (attend_shapes_.empty() || pool_->threads() == 1) return;
    int64_t largest = 0;
    for (const HeadShape& shape : attend_shapes_) {
        largest = std::max(largest, attend_partial(shape.heads, attend_width(shape)));
    }
    partials_ = Arena(kSharedTokens / kChunkTokens * largest * sizeof(float));
}

size_t Program::bytes() const {
    size_t bytes = arena_.size() + partials_.size();
    for (const Arena& scratch : scratch_) bytes += scratch.size();
    return bytes;
}

void Program::run(const Batch& batch, int rows, int worker) {
    const Context shared{batch, rows, worker};
    const Context alone{batch, rows, worker, true};
    for (size_t n = 0; n < instructions_.size();) {
        step(instructions_[n], shared);
        const size_t first = ++n;
        while (n < instructions_.size() && is_brief(instructions_[n], rows)) ++n;
        pool_->barrier([&] {
            for (size_t brief = first; brief < n; ++brief) step(instructions_[brief], alone);
        });
    }
}

void Program::run_timed(const Batch& batch, int rows, int worker, Laps& laps) {
    using Clock = std::chrono::steady_clock;
    const Context context{batch, rows, worker};
    if (worker == 0) laps = {std::vector<double>(instructions_.size()), std::vector<int64_t>(instructions_.size())};
    Clock::time_point began = Clock::now();
    for (size_t n = 0; n < instructions_.size(); ++n) {
        step(instructions_[n], context);
        pool_->barrier();
        if (worker > 0) continue;
        const Clock::time_point now = Clock::now();
        laps.seconds[n] = std::chrono::duration<double>(now - began).count();
        if (instructions_[n].op == Op::Experts) laps.expert_bytes[n] = expert_bytes(instructions_[n], rows);
        began = now;
    }
}

Act8 Program::act8(int64_t offset, int width, int64_t rows) const {
    const int64_t groups = width / kCell * rows;
    uint8_t* at = arena_.data() + offset;
    float* scale = reinterpret_cast<float*>(at + groups * kCell);
    return {reinterpret_cast<int8_t*>(at), scale, scale + groups, reinterpret_cast<int32_t*>(scale + 2 * groups), rows};
}

Act16 Program::act16(int64_t offset, int width, int64_t rows) const {
    const int64_t groups = width / kCell * rows;
    uint8_t* at = arena_.data() + offset;
    float* sum = reinterpret_cast<float*>(at + groups * kCell * 2);
    return {reinterpret_cast<int16_t*>(at), sum, sum + groups, rows};
}

void Program::pack_row(const Place& place, const float* x, int64_t row) const {
    const auto [at, width, rows] = place;
    if (at[FORM_INT8] != kNone) kernels_.pack_int8(x, width, act8(at[FORM_INT8], width, rows), row);
    if (at[FORM_INT16] != kNone) kernels_.pack_int16(x, width, act16(at[FORM_INT16], width, rows), row);
    if (at[FORM_BFLOAT16] != kNone) kernels_.pack_bfloat16(x, width, floats(at[FORM_BFLOAT16], row, width), 0);
}

void Program::step(const Instruction& i, const Context& c) {
    const float* in = floats(i.in[FORM_FLOAT] == kNone ? 0 : i.in[FORM_FLOAT]);
    float* buffer = scratch(c.worker);
    const int blocks = count_blocks(c.rows, kRowBlock);
    const Place in_place = {i.in, i.width, c.rows};
    const Place out_place = {i.out, i.out_width, c.rows};
    const auto rows_of = [&](int block) { return std::min(kRowBlock, c.rows - block * kRowBlock); };
    switch (i.op) {
        case Op::Embed:
            each_row(out_place, c, [&](int r, float* out) { embed_row(i, c.batch.tokens[r], out, buffer); });
            break;
        case Op::EmbedPositions:
            each_row(out_place, c, [&](int r, float* out) {
                embed_row(i, c.batch.positions[r] + i.offset, out, buffer);
                kernels_.finish(out, i.out_width, nullptr, 1, floats(i.residual, r, i.out_width), out);
            });
            break;
        case Op::Rotary:
            each_row(out_place, c, [&](int r, float* out) { rotary_row(i, c.batch.positions[r], out); });
            break;
        case Op::Norm:
            each_row(out_place, c, [&](int r, float* out) {
                const NormTerms terms = {i.first.data(), some(i.second), maybe(i.residual, r, i.width), i.eps,
                                         i.center};
                kernels_.norm(in + int64_t{r} * i.width, terms, i.width, out);
            });
            break;
        case Op::Activate:
            each_row(out_place, c, [&](int r, float* out) {
                kernels_.activate(in + int64_t{r} * i.width, i.activation, some(i.first), maybe(i.other, r, i.width),
                                  i.width, out);
            });
            break;
        case Op::Add:
            each_row(out_place, c, [&](int r, float* out) {
                kernels_.add(in + int64_t{r} * i.width, floats(i.other, r, i.width), i.scale, i.width, out);
            });
            break;
        case Op::Blend:
            each_row(out_place, c, [&](int r, float* out) {
                kernels_.blend(in + int64_t{r} * i.width, *floats(i.other, r, 1), maybe(i.residual, r, i.width),
                               i.width, out);
            });
            break;
        case Op::Mix:
            each_row(out_place, c, [&](int r, float* out) { mix_row(i, r, out); });
            break;
        case Op::MatchRms:
            each_row(out_place, c, [&](int r, float* out) {
                kernels_.match_rms(in + int64_t{r} * i.width, floats(i.other, r, i.width), i.eps, i.width, out);
            });
            break;
        case Op::Reorder:
            each_row(out_place, c, [&](int r, float* out) {
                const float* row = in + int64_t{r} * i.width;
                for (int j = 0; j < i.width; ++j) out[j] = row[i.columns[j]];
            });
            break;
        case Op::KeepTop:
            each_row(out_place, c, [&](int r, float* out) {
                kernels_.keep_top(in + int64_t{r} * i.width, i.deviations, i.width, out);
            });
            break;
        case Op::Gather:
            each_row(c.batch.rows_count, c, [&](int r) {
                std::memcpy(floats(i.out[FORM_FLOAT], r, i.width), in + int64_t{c.batch.rows[r]} * i.width,
                            sizeof(float) * i.width);
            });
            break;
        case Op::Pack:
            each_row(c.rows, c, [&](int r) { pack_row(out_place, in + int64_t{r} * i.out_width, r); });
            break;
        case Op::Headwise:
        case Op::Linear:
        case Op::Logits: {
            const LinearEnd end = {some(i.first), i.scale, i.residual, i.softcap, i.out[FORM_FLOAT], i.out_width};
            pool_->share_nearby(i.factor.starts, blocks, c.worker, [&](int item, int block) {
                const Tile& tile = i.factor.tiles[item];
                if (i.op == Op::Headwise) {
                    headwise_tile(i, tile, block * kRowBlock, rows_of(block), buffer);
                } else {
                    linear_tile(i.factor, in_place, tile, block * kRowBlock, rows_of(block), end, buffer);
                }
            });
            break;
        }
        case Op::Gated:
            pool_->share_nearby(i.factor.starts, blocks, c.worker, [&](int item, int block) {
                gated_tile(i.factor, in_place, out_place, i.factor.tiles[item], block * kRowBlock, rows_of(block),
                           some(i.first), i.activation, i.limit, buffer);
            });
            break;
        case Op::Experts:
            mixture(i, c);
            break;
        case Op::StoreKV:
        case Op::StoreLatent:
            each_run(c.rows, c, [&](int first, int end) { store_run(i, c, first, end, buffer); });
            break;
        case Op::Attend: {
            const int items = static_cast<int>(c.batch.attend[i.plan].pieces.size()) * i.shape.kv_heads;
            pool_->share(items, [&](int item) { attend_item(i, c, item, buffer); });
            break;
        }
    }
}

void Program::embed_row(const Instruction& i, int32_t id, float* out, float* buffer) const {
    const Weight& table = *i.factor.weight;
    size_t part = 0;
    while (id - table.first[part] >= table.parts[part].n_out) ++part;
    const Panels& panels = table.parts[part];
    const int row = id - table.first[part];
    const uint8_t* panel = panels.data + row / kColumns * panels.panel_bytes;
    constexpr int kCells = kFloatScratch / (kCell * kColumns);
    for (int k = 0; k < panels.n_in; k += kCells * kCell) {
        const int depth = std::min(kCells * kCell, panels.n_in - k);
        kernels_.unpack[panels.kind](panel, k / kCell, count_blocks(depth, kCell), buffer, kColumns);
        for (int j = 0; j < depth; ++j) out[k + j] = buffer[j * kColumns + row % kColumns] * i.scale;
    }
}

void Program::mix_row(const Instruction& i, int row, float* out) const {
    const float* coefficients = floats(i.other, row, i.other_width) + i.offset;
    std::memset(out, 0, sizeof(float) * i.width);
    for (size_t j = 0; j < i.streams.size(); ++j) {
        kernels_.add_scaled(floats(i.streams[j], row, i.width), coefficients[j], i.width, out);
    }
    if (i.residual != kNone) kernels_.finish(out, i.width, nullptr, 1, floats(i.residual, row, i.width), out);
}

void Program::rotary_row(const Instruction& i, int32_t position, float* out) const {
    const size_t half = i.first.size();
    for (size_t j = 0; j < half; ++j) {
        const float angle = static_cast<float>(position) * i.first[j];
        out[j] = static_cast<float>(std::cos(static_cast<double>(angle))) * i.scale;
        out[half + j] = static_cast<float>(std::sin(static_cast<double>(angle))) * i.scale;
    }
}

void Program::product(const Factor& factor, const Place& x, int part, int panel, int panels, int row, int rows,
                      float* out, int64_t stride, float* buffer) const {
    const Panels& weight = factor.weight->parts[part];
    switch (factor.forms[part]) {
        case FORM_INT8:
            kernels_.linear_int8[weight.kind](weight, panel, panels, act8(x.at[FORM_INT8], x.width, x.rows), row, rows,
                                              out, stride);
            break;
        case FORM_INT16:
            kernels_.linear_int16[weight.kind](weight, panel, panels, act16(x.at[FORM_INT16], x.width, x.rows), row,
                                               rows, out, stride);
            break;
        case FORM_BFLOAT16:
            kernels_.linear_bfloat16(weight, panel, panels, floats(x.at[FORM_BFLOAT16]), x.width, row, rows, out,
                                     stride, buffer);
            break;
        default:
            kernels_.linear_float[weight.kind](weight, panel, panels, floats(x.at[FORM_FLOAT]), x.width, row, rows, out,
                                               stride, buffer);
    }
}

// Heads and tiles are whole panels, so the product can go straight to its place.
void Program::headwise_tile(const Instruction& i, const Tile& tile, int row, int rows, float* buffer) const {
    const Panels& weight = i.factor.weight->parts[tile.part];
    const int head = tile.column / (i.out_width / i.heads);
    kernels_.linear_float[weight.kind](weight, tile.panel, tile.panels, floats(i.in[FORM_FLOAT]) + head * i.width,
                                       int64_t{i.heads} * i.width, row, rows,
                                       floats(i.out[FORM_FLOAT], row, i.out_width) + tile.column, i.out_width, buffer);
}

void Program::linear_tile(const Factor& factor, const Place& x, const Tile& tile, int row, int rows,
                          const LinearEnd& end, float* buffer) const {
    const bool plain = end.bias == nullptr && end.scale == 1 && end.residual == kNone && end.softcap <= 0;
    if (plain && tile.columns == tile.panels * kColumns) {
        product(factor, x, tile.part, tile.panel, tile.panels, row, rows,
                floats(end.out, row, end.out_width) + tile.column, end.out_width, buffer);
        return;
    }
    float* result = buffer + kFloatScratch;
    product(factor, x, tile.part, tile.panel, tile.panels, row, rows, result, kWide, buffer);
    const float* bias = end.bias == nullptr ? nullptr : end.bias + tile.column;
    for (int r = 0; r < rows; ++r) {
        const float* residual =
            end.residual == kNone ? nullptr : floats(end.residual, row + r, end.out_width) + tile.column;
        float* out = floats(end.out, row + r, end.out_width) + tile.column;
        kernels_.finish(result + r * kWide, tile.columns, bias, end.scale, residual, out);
        if (end.softcap > 0) kernels_.cap(out, tile.columns, end.softcap);
    }
}

// Columns [column, column + columns) of the product, wherever parts and panels begin, to out[r * kWide].
void Program::gather_columns(const Factor& factor, const Place& x, int column, int columns, int row, int rows,
                             float* out, float* buffer) const {
    float* result = buffer + kFloatScratch;
    const Weight& weight = *factor.weight;
    for (size_t part = 0; part < weight.parts.size(); ++part) {
        const int first = weight.first[part];
        const int from = std::max(column, first) - first;
        const int end = std::min(column + columns, first + weight.parts[part].n_out) - first;
        if (from >= end) continue;
        const int panel = from / kColumns;
        const int panels = count_blocks(end, kColumns) - panel;
        const bool aligned = from % kColumns == 0 && end - from == columns;
        product(factor, x, static_cast<int>(part), panel, panels, row, rows, aligned ? out : result, kWide, buffer);
        if (aligned) return;
        for (int r = 0; r < rows; ++r) {
            std::memcpy(out + r * kWide + (from + first - column), result + r * kWide + from % kColumns,
                        sizeof(float) * (end - from));
        }
    }
}

void Program::gated_tile(const Factor& factor, const Place& x, const Place& out, const Tile& tile, int row, int rows,
                         const float* bias, int activation, float limit, float* buffer) const {
    const int column = tile.column;
    const int columns = tile.columns;
    float* gates = buffer + kFloatScratch + int64_t{kRowBlock} * kWide;
    float* ups = gates + int64_t{kRowBlock} * kWide;
    gather_columns(factor, x, column, columns, row, rows, gates, buffer);
    gather_columns(factor, x, out.width + column, columns, row, rows, ups, buffer);
    const bool kept = out.at[FORM_FLOAT] != kNone;
    const bool packed = out.at[FORM_INT8] != kNone;  // the width is then a multiple of 32: the tile is one group
    const Act8 group = packed ? from_group(act8(out.at[FORM_INT8], out.width, out.rows), column / kCell) : Act8{};
    GateTerms terms = {nullptr, nullptr, activation, limit};
    if (bias != nullptr) {
        terms.gate_bias = bias + column;
        terms.up_bias = terms.gate_bias + out.width;
    }
    for (int r = 0; r < rows; ++r) {
        float* gated = gates + r * kWide;
        float* result = kept ? floats(out.at[FORM_FLOAT], row + r, out.width) + column : gated;
        kernels_.gate(gated, ups + r * kWide, terms, columns, result);
        if (packed) kernels_.pack_int8(result, columns, group, row + r);
        if (out.at[FORM_BFLOAT16] != kNone) {
            kernels_.pack_bfloat16(result, columns, floats(out.at[FORM_BFLOAT16], row + r, out.width), column);
        }
    }
}

// The first row from `row` on where a run may begin: tokens whose keys can be stored together belong to one run.
int Program::lot_begin(const Context& c, int row) const {
    const Batch& batch = c.batch;
    while (row > 0 && row < c.rows && batch.owner[row] == batch.owner[row - 1] &&
           batch.positions[row] % kStoreLot != 0) {
        ++row;
    }
    return std::min(row, c.rows);
}

void Program::store_run(const Instruction& i, const Context& c, int row, int end, float* buffer) const {
    const int first = lot_begin(c, row);
    const int tokens = lot_begin(c, end) - first;
    if (tokens == 0) return;
    const HeadShape& shape = i.shape;
    const BlockTable& table = c.batch.tables[i.group];
    static_assert(kBriefRows <= kMostRun);
    TokenPlace places[kMostRun + kStoreLot - 1];
    for (int t = 0; t < tokens; ++t) {
        const int position = c.batch.positions[first + t];
        const int32_t* ids = table.ids + c.batch.slots[c.batch.owner[first + t]] * table.columns;
        places[t] = {ids[position / shape.block_size], position % shape.block_size, position};
    }
    const float* rotary = i.rotary == kNone ? nullptr : floats(i.rotary, first, i.width);
    const int half = i.rotary == kNone ? 0 : i.width / 2;
    const LayerCache& cache = cache_->layers[i.layer];
    float* q = floats(i.out[FORM_FLOAT], first, i.out_width);
    if (i.op == Op::StoreLatent) {
        const int rope = shape.head_dim - shape.latent;
        const float* q_latent = floats(i.streams[0], first, shape.heads * shape.latent);
        const float* q_rope = floats(i.streams[1], first, shape.heads * rope);
        const float* latent = floats(i.streams[2], first, shape.latent);
        const float* k_rope = floats(i.streams[3], first, rope);
        kernels_.store_latent({q_latent, q_rope, latent, k_rope, rotary, half, cache, places, tokens, q, buffer},
                              shape);
        return;
    }
    const int heads = shape.heads + (shape.stores ? 2 * shape.kv_heads : 0);
    const float* qkv = floats(i.in[FORM_FLOAT], first, heads * shape.head_dim);
    StoreItem item = {qkv, rotary, half, {}, cache, places, tokens, q, buffer};
    for (int n = 0; n < 3; ++n) {
        item.norms[n] = i.norms[n].norm;
        item.norms[n].weight = some(i.norms[n].weight);
    }
    kernels_.store_kv(item, shape);
}

AttendItem Program::attend_work(const Instruction& i, const Context& c, int item, float* buffer) const {
    const AttendPiece& piece = c.batch.attend[i.plan].pieces[item / i.shape.kv_heads];
    const BlockTable& table = c.batch.tables[i.group];
    return {
        floats(i.in[FORM_FLOAT], piece.token, i.width),
        floats(i.out[FORM_FLOAT], piece.token, i.out_width),
        cache_->layers[i.layer],
        table.ids + c.batch.slots[piece.sequence] * table.columns,
        i.second.empty() ? nullptr : i.second.data(),
        i.first.empty() ? nullptr : i.first.data(),
        item % i.shape.kv_heads,
        c.batch.positions[piece.token],
        piece.tokens,
        buffer,
        nullptr,
    };
}

void Program::attend_item(const Instruction& i, const Context& c, int item, float* buffer) const {
    const AttendPlan& plan = c.batch.attend[i.plan];
    const AttendPiece& piece = plan.pieces[item / i.shape.kv_heads];
    const int head = item % i.shape.kv_heads;
    AttendItem work = attend_work(i, c, item, buffer);
    // Workers take items in turn, as a rule.
    AttendItem following;
    const int later = item + pool_->threads();
    if (later < static_cast<int>(plan.pieces.size()) * i.shape.kv_heads) {
        following = attend_work(i, c, later, nullptr);
        work.following = &following;
    }
    if (piece.pieces == 1) {
        kernels_.attend(work, i.shape);
        return;
    }
    const int64_t partial = attend_partial(piece.tokens * (i.shape.heads / i.shape.kv_heads), attend_width(i.shape));
    float* partials = reinterpret_cast<float*>(partials_.data()) + piece.partials + head * piece.all_chunks * partial;
    kernels_.attend_part(work, i.shape, piece.first_chunk, piece.chunks,
                         partials + (piece.first_chunk - piece.begin_chunk) * partial);
    // Whoever does the last piece joins them, in the order of the chunks, and makes the counter ready for the next
    // layer.
    std::atomic<int>& left = plan.left[piece.counter + head];
    if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    left.store(piece.pieces, std::memory_order_relaxed);
    kernels_.attend_join(work, i.shape, piece.all_chunks, partials);
}

}  // namespace octavo
