#include "profile.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "arena.h"

namespace octavo {

namespace {

using Clock = std::chrono::steady_clock;

const char* title(Op op) {
    switch (op) {
        case Op::Embed:
        case Op::EmbedPositions:
            return "embed";
        case Op::Rotary:
            return "rotary";
        case Op::Norm:
            return "norm";
        case Op::Activate:
            return "activate";
        case Op::Add:
            return "add";
        case Op::Blend:
            return "blend";
        case Op::Mix:
            return "mix";
        case Op::MatchRms:
            return "match_rms";
        case Op::KeepTop:
            return "keep_top";
        case Op::Reorder:
            return "reorder";
        case Op::Pack:
            return "pack";
        case Op::Experts:
            return "moe";
        case Op::Headwise:
            return "headwise";
        case Op::Linear:
            return "linear";
        case Op::Gated:
            return "gated";
        case Op::StoreKV:
        case Op::StoreLatent:
            return "store_kv";
        case Op::Attend:
            return "attend";
        case Op::Gather:
            return "gather";
        case Op::Logits:
            return "logits";
    }
    return "";
}

// Every kind of weight once, and the forms of its inputs: "linear Q4_K/Q6_K int8".
std::string name_of(const Instruction& i) {
    std::string name = title(i.op);
    const bool window = i.op == Op::Attend && i.shape.window > 0;
    if (window) return name + " window " + std::to_string(i.shape.window);
    const bool experts = i.op == Op::Experts;
    const Factor& factor = experts ? i.mixture->gate_up.front() : i.factor;
    if (!factor.weight) return name;
    static const char* const forms[FORM_COUNT] = {"float32", "int8", "int16", "bfloat16"};
    std::vector<std::string> parts, inputs;
    const auto once = [](std::vector<std::string>& list, const char* word) {
        if (std::find(list.begin(), list.end(), word) == list.end()) list.push_back(word);
    };
    for (size_t part = 0; part < factor.weight->parts.size(); ++part) {
        once(parts, kKinds[factor.weight->parts[part].kind].name);
        if (part < factor.forms.size()) once(inputs, forms[factor.forms[part]]);
    }
    for (size_t n = 0; n < parts.size(); ++n) name += (n == 0 ? " " : "/") + parts[n];
    for (size_t n = 0; n < inputs.size(); ++n) name += (n == 0 ? " " : "/") + inputs[n];
    return name;
}

void add_product(const Factor& factor, int64_t rows, Cost& cost) {
    for (size_t part = 0; part < factor.forms.size(); ++part) {
        const Panels& panels = factor.weight->parts[part];
        cost.operations[factor.forms[part]] += 2 * rows * panels.n_in * panels.n_out;
    }
}

void add_attention(const HeadShape& shape, int64_t block_bytes, const Batch& batch, Cost& cost) {
    for (int s = 0; s < batch.sequences; ++s) {
        const int first = batch.positions[batch.starts[s]];
        const int last = batch.positions[batch.starts[s + 1] - 1];
        int64_t seen = 0;
        for (int position = first; position <= last; ++position) seen += position + 1 - attend_begin(shape, position);
        cost.operations[FORM_FLOAT] += 2 * seen * shape.heads * (shape.head_dim + attend_width(shape));
        cost.bytes += (last + 1 - attend_begin(shape, first)) * block_bytes / shape.block_size;
    }
}

Cost cost_of(const Program& program, const Instruction& i, const Batch& batch, int64_t rows) {
    Cost cost;
    switch (i.op) {
        case Op::Embed:
        case Op::EmbedPositions:
            for (const Panels& part : i.factor.weight->parts) {
                cost.bytes = std::max(cost.bytes, rows * part.panel_bytes / kColumns);
            }
            break;
        case Op::Headwise:
        case Op::Linear:
        case Op::Gated:
        case Op::Logits:
            add_product(i.factor, rows, cost);
            cost.bytes = static_cast<int64_t>(i.factor.weight->bytes);
            break;
        case Op::Experts: {
            const Mixture& m = *i.mixture;
            const int64_t pairs = rows * m.router.top_k;
            add_product(m.gate_up.front(), pairs, cost);
            add_product(m.down.front(), pairs, cost);
            break;  // the bytes depend on the routes of the step: Laps has them
        }
        case Op::StoreKV:
        case Op::StoreLatent:
            if (i.shape.stores) cost.bytes = rows * program.block_bytes() / i.shape.block_size;
            break;
        case Op::Attend:
            add_attention(i.shape, program.block_bytes(), batch, cost);
            break;
        default:
            break;
    }
    return cost;
}

constexpr double kSeconds = 0.3;                  // of tries
constexpr size_t kReadBytes = size_t{192} << 20;  // more than caches hold
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr int64_t kRounds = 400'000;  // some milliseconds

// The shortest of the tries, in seconds.
template <class Try>
double shortest(const Try& once) {
    const auto since = [](Clock::time_point began) {
        return std::chrono::duration<double>(Clock::now() - began).count();
    };
    double best = 1e30;
    const Clock::time_point first = Clock::now();
    while (since(first) < kSeconds) {
        const Clock::time_point began = Clock::now();
        once();
        best = std::min(best, since(began));
    }
    return best;
}

}  // namespace

void Profile::add(const Program& program, const Batch& batch, int rows, const Laps& laps, Times& times) {
    for (size_t n = 0; n < laps.seconds.size(); ++n) {
        const Instruction& instruction = program.instructions()[n];
        OpTime& time = times[name_of(instruction)];
        const Cost cost = cost_of(program, instruction, batch, rows);
        ++time.calls;
        time.seconds += laps.seconds[n];
        time.cost.bytes += cost.bytes + laps.expert_bytes[n];
        for (int form = 0; form < FORM_COUNT; ++form) time.cost.operations[form] += cost.operations[form];
    }
}

Roofline measure_roofline(Pool& pool) {
    const Kernels& table = kernels();
    Roofline found{};
    {
        const Arena memory(kReadBytes);
        const int pieces = static_cast<int>(kReadBytes / kPieceBytes);
        std::vector<int> starts;  // of each node: read as weights are
        for (int node = 0; node <= pool.nodes(); ++node) starts.push_back(pool.first_owned(node, pieces));
        pool.run([&](int worker) {  // pages that nobody has written are one and the same
            pool.each_local(starts, worker, [&](int piece, int) {
                std::memset(memory.data() + piece * kPieceBytes, piece + 1, kPieceBytes);
            });
        });
        const double seconds = shortest([&] {
            pool.run([&](int worker) {
                pool.each_nearby(starts, 1, worker,
                                 [&](int piece, int) { table.read(memory.data() + piece * kPieceBytes, kPieceBytes); });
            });
        });
        found.bytes_per_second = kReadBytes / seconds;
    }
    int64_t (*const multiply[FORM_COUNT])(int64_t) = {table.multiply_float, table.multiply_int8, table.multiply_int16,
                                                      table.multiply_bfloat16};
    for (int form = 0; form < FORM_COUNT; ++form) {
        int64_t operations = 0;  // of one thread
        const double seconds = shortest([&] {
            pool.run([&](int worker) {
                const int64_t done = multiply[form](kRounds);
                if (worker == 0) operations = done;
            });
        });
        found.operations_per_second[form] = pool.threads() * operations / seconds;
    }
    return found;
}

}  // namespace octavo
