// A mixture of experts as phases of a step: route, group by expert, hand rows out, the two products of every expert
// that has rows, and the sums of each row's results. Every phase but the grouping is shared by all workers.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace octavo {

// Many rows go through in passes, which bounds the memory for pairs. What a row computes does not depend on it.
void Program::mixture(const Instruction& i, const Context& c) {
    const int passes = count_blocks(c.rows, i.mixture->pass_rows);
    for (int pass = 0; pass < passes; ++pass) {
        const int first = static_cast<int>(int64_t{c.rows} * pass / passes);
        const int end = static_cast<int>(int64_t{c.rows} * (pass + 1) / passes);
        if (pass > 0) pool_->barrier();
        mixture_pass(i, c, first, end - first);
    }
}

// Of the experts that got rows in the last pass, and as much for each pass before.
int64_t Program::expert_bytes(const Instruction& i, int rows) const {
    const Mixture& m = *i.mixture;
    size_t bytes = 0;
    int last = -1;
    for (const ExpertTask& task : routes_.tasks) {
        if (task.expert != last) bytes += m.gate_up[task.expert].weight->bytes + m.down[task.expert].weight->bytes;
        last = task.expert;
    }
    return static_cast<int64_t>(bytes) * count_blocks(rows, m.pass_rows);
}

void Program::mixture_pass(const Instruction& i, const Context& c, int first, int rows) {
    const Mixture& m = *i.mixture;
    const int worker = c.worker;
    const Router& router = m.router;
    const int top_k = router.top_k;
    const int pairs = rows * top_k;
    float* buffer = scratch(worker);

    pool_->share(rows, [&](int r) {
        route(kernels_, router, floats(m.logits, first + r, router.experts),
              m.correction.empty() ? nullptr : m.correction.data(), buffer, routes_.chosen.data() + r * top_k,
              routes_.weights.data() + r * top_k);
    });
    pool_->barrier([&] { routes_.group(pairs, router.experts, kRowBlock); });

    const Place given = {m.given, i.width, pairs};
    each_row(given, c, [&](int p, float* out) {
        const int pair = routes_.order[p];
        const float* x = floats(i.in[FORM_FLOAT], first + pair / top_k, i.width);
        const std::vector<int32_t>& columns = m.gate_up[routes_.chosen[pair]].columns;
        if (columns.empty()) {
            std::memcpy(out, x, sizeof(float) * i.width);
        } else {
            for (int j = 0; j < i.width; ++j) out[j] = x[columns[j]];
        }
        if (router.weigh_input) kernels_.finish(out, i.width, nullptr, routes_.weights[pair], nullptr, out);
    });
    pool_->barrier();

    const int tasks = static_cast<int>(routes_.tasks.size());
    const Place hidden = {m.hidden, m.inner, pairs};
    const int64_t only_floats[FORM_COUNT] = {m.hidden[FORM_FLOAT], kNone, kNone, kNone};
    const Place gated = {m.reordered ? only_floats : m.hidden, m.inner, pairs};
    pool_->each_nearby(m.gate_up.front().starts, tasks, worker, [&](int item, int n) {
        const ExpertTask& task = routes_.tasks[n];
        const Factor& factor = m.gate_up[task.expert];
        if (factor.tiles[item].columns == 0) return;
        const float* bias =
            m.gate_up_bias.empty() ? nullptr : m.gate_up_bias.data() + int64_t{2} * m.inner * task.expert;
        gated_tile(factor, given, gated, factor.tiles[item], task.first, task.count, bias, i.activation, i.limit,
                   buffer);
    });

    // Another order of columns, and the scale of int16, need the whole row, which no tile has.
    if (m.reordered) {
        pool_->each(pairs, worker, [&](int p, int) {
            const std::vector<int32_t>& columns = m.down[routes_.chosen[routes_.order[p]]].columns;
            float* row = floats(m.hidden[FORM_FLOAT], p, m.inner);
            if (!columns.empty()) {
                float* copy = buffer + kFloatScratch;
                std::memcpy(copy, row, sizeof(float) * m.inner);
                for (int j = 0; j < m.inner; ++j) row[j] = copy[columns[j]];
            }
            pack_row(hidden, row, p);
        });
    } else if (m.hidden[FORM_INT16] != kNone) {
        const int64_t at[FORM_COUNT] = {kNone, kNone, m.hidden[FORM_INT16], kNone};
        pool_->each(pairs, worker,
                    [&](int p, int) { pack_row({at, m.inner, pairs}, floats(m.hidden[FORM_FLOAT], p, m.inner), p); });
    }

    pool_->each_nearby(m.down.front().starts, tasks, worker, [&](int item, int n) {
        const ExpertTask& task = routes_.tasks[n];
        const Factor& factor = m.down[task.expert];
        if (factor.tiles[item].columns == 0) return;
        const float* bias = m.down_bias.empty() ? nullptr : m.down_bias.data() + int64_t{i.out_width} * task.expert;
        linear_tile(factor, hidden, factor.tiles[item], task.first, task.count,
                    {bias, 1, kNone, 0, m.results, i.out_width}, buffer);
    });

    const Place out_place = {i.out, i.out_width, c.rows};
    each_row(rows, c, [&](int r) {
        make_row(out_place, first + r, worker, [&](float* out) {
            std::memset(out, 0, sizeof(float) * i.out_width);
            for (int pair = r * top_k; pair < (r + 1) * top_k; ++pair) {
                const float weight = router.weigh_input ? 1.0f : routes_.weights[pair];
                kernels_.add_scaled(floats(m.results, routes_.place[pair], i.out_width), weight, i.out_width, out);
            }
            const float* residual = maybe(i.residual, first + r, i.out_width);
            if (residual != nullptr) kernels_.finish(out, i.out_width, nullptr, 1, residual, out);
        });
    });
}

}  // namespace octavo
