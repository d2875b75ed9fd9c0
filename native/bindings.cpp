// The Python face of the native parts: octavo._native, typed in octavo/_native.pyi. Arrays are checked in Python
// (octavo/ops/check.py) before they come here; shapes and types are enforced by the signatures.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu_features.h"
#include "model.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutVector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutMatrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;

int kind_of(const std::string& name) {
    for (int kind = 0; kind < KIND_COUNT; ++kind) {
        if (name == kKinds[kind].name) return kind;
    }
    throw nb::value_error(("the native kernels have no weight format " + name).c_str());
}

std::shared_ptr<Weight> allocate_weight(const Pool& pool, Store& store,
                                        const std::vector<std::pair<std::string, int>>& parts, int n_in) {
    if (parts.empty()) throw nb::value_error("a weight needs at least one part");
    std::vector<PartShape> shapes;
    for (const auto& [name, n_out] : parts) {
        const int kind = kind_of(name);
        if (n_out < 1 || n_in < 1 || n_in % kKinds[kind].block != 0) {
            throw nb::value_error((name + " has no matrix [" + std::to_string(n_out) + ", " + std::to_string(n_in) +
                                   "]: rows are blocks of " + std::to_string(kKinds[kind].block) + " elements")
                                      .c_str());
        }
        shapes.push_back({kind, n_out});
    }
    const nb::gil_scoped_release free;
    return make_weight(pool, store, shapes, n_in);
}

// The first of the parts cut from `source`, and its rows in all of them; none where there is no such source.
std::pair<size_t, int> find_source(const Weight& weight, int source) {
    const auto range = std::equal_range(weight.source.begin(), weight.source.end(), source);
    const size_t first = range.first - weight.source.begin();
    const size_t end = range.second - weight.source.begin();
    if (first == end) return {first, 0};
    return {first, weight.first[end - 1] + weight.parts[end - 1].n_out - weight.first[first]};
}

void pack_source(Pool& pool, const Weight& weight, int source, int first_row, nb::handle stored, nb::object packers) {
    const std::string name = nb::cast<std::string>(stored.attr("kind"));
    const int n_out = nb::cast<int>(stored.attr("n_out"));
    const Bytes data = nb::cast<Bytes>(stored.attr("data"));
    const auto [part, rows] = find_source(weight, source);
    if (first_row < 0 || first_row % kColumns != 0 || n_out < 1 || n_out > rows - first_row) {
        throw nb::value_error("pack: these rows are not in the weight");
    }
    const KindInfo& info = kKinds[weight.parts[part].kind];
    const int64_t row_bytes = int64_t{weight.n_in} / info.block * info.block_bytes;
    if (name != info.name || nb::cast<int>(stored.attr("n_in")) != weight.n_in ||
        static_cast<int64_t>(data.shape(0)) != n_out || static_cast<int64_t>(data.shape(1)) != row_bytes ||
        (row_bytes > 1 && data.stride(1) != 1)) {
        throw nb::value_error((std::string(info.name) + " matrix [" + std::to_string(n_out) + ", " +
                               std::to_string(weight.n_in) + "] needs uint8 [" + std::to_string(n_out) + ", " +
                               std::to_string(row_bytes) + "] with contiguous rows")
                                  .c_str());
    }
    int32_t* told = nullptr;
    if (!packers.is_none()) {
        const OutVector<int32_t> out = nb::cast<OutVector<int32_t>>(packers);
        if (static_cast<int>(out.size()) != count_blocks(n_out, kColumns)) {
            throw nb::value_error("pack: `packers` has one number per panel");
        }
        told = out.data();
    }
    const nb::gil_scoped_release free;
    pack_rows(pool, weight, source, first_row, {n_out, data.data(), data.stride(0)}, told);
}

void unpack_weight(Pool& pool, const Weight& weight, OutMatrix<float> out) {
    if (static_cast<int>(out.shape(0)) != weight.n_out || static_cast<int>(out.shape(1)) != weight.n_in) {
        throw nb::value_error("unpack: `out` must be [n_out, n_in]");
    }
    const Kernels& table = kernels();
    float* values = out.data();
    const nb::gil_scoped_release free;
    pool.run([&](int worker) {
        alignas(32) float cell[kCell * kColumns];
        for (size_t i = 0; i < weight.parts.size(); ++i) {
            const Panels& part = weight.parts[i];
            pool.each((part.n_out + kColumns - 1) / kColumns, worker, [&](int panel, int) {
                for (int k = 0; k < part.n_in; ++k) {
                    if (k % kCell == 0) {
                        table.unpack[part.kind](part.data + panel * part.panel_bytes, k / kCell, 1, cell, kColumns);
                    }
                    for (int c = 0; c < kColumns && panel * kColumns + c < part.n_out; ++c) {
                        const int64_t row = weight.first[i] + panel * kColumns + c;
                        values[row * part.n_in + k] = cell[k % kCell * kColumns + c];
                    }
                }
            });
        }
    });
}

std::vector<float> copy_floats(const Vector<float>& values) { return {values.data(), values.data() + values.size()}; }

std::vector<float> copy_floats(const nb::object& values) {
    if (values.is_none()) return {};
    return copy_floats(nb::cast<Vector<float>>(values));
}

void set_offsets(int64_t (&to)[FORM_COUNT], const std::vector<int64_t>& offsets) {
    if (offsets.size() != FORM_COUNT) throw nb::value_error("an activation has one offset per form");
    for (int form = 0; form < FORM_COUNT; ++form) to[form] = offsets[form];
}

using Offsets = std::vector<int64_t>;

// `wanted`: the form of each source.
Factor make_factor(std::shared_ptr<Weight> weight, const std::vector<int>& wanted) {
    if (static_cast<int>(wanted.size()) != weight->source.back() + 1) {
        throw nb::value_error("a weight has one form per part");
    }
    std::vector<int> forms;
    for (const int source : weight->source) forms.push_back(wanted[source]);
    const Kernels& table = kernels();
    for (size_t part = 0; part < forms.size(); ++part) {
        const int kind = weight->parts[part].kind;
        const bool known = forms[part] == FORM_FLOAT || (forms[part] == FORM_INT8 && table.linear_int8[kind]) ||
                           (forms[part] == FORM_INT16 && table.linear_int16[kind]) ||
                           (forms[part] == FORM_BFLOAT16 && kind == BF16 && weight->n_in % kCell == 0);
        if (!known) throw nb::value_error((std::string(kKinds[kind].name) + " has no product in this form").c_str());
    }
    return {std::move(weight), std::move(forms), {}, {}, {}};
}

Instruction product(Op op, const Offsets& in, int64_t out, std::shared_ptr<Weight> weight, std::vector<int> forms) {
    Instruction i{};
    i.op = op;
    set_offsets(i.in, in);
    i.out[FORM_FLOAT] = out;
    i.width = weight->n_in;
    i.out_width = weight->n_out;
    i.factor = make_factor(std::move(weight), std::move(forms));
    return i;
}

Router read_router(nb::handle router, int experts) {
    const auto integer = [&](const char* name) { return nb::cast<int>(router.attr(name)); };
    const auto number = [&](const char* name) { return nb::cast<float>(router.attr(name)); };
    const std::string scoring = nb::cast<std::string>(router.attr("scoring"));
    Router out{};
    out.experts = experts;
    out.top_k = integer("top_k");
    out.scoring = scoring == "softmax" ? SCORE_SOFTMAX : scoring == "sigmoid" ? SCORE_SIGMOID : SCORE_SPARSEMIXER;
    out.renormalize = nb::cast<bool>(router.attr("renormalize"));
    out.groups = integer("groups");
    out.top_groups = integer("top_groups");
    out.two_largest = nb::cast<std::string>(router.attr("group_score")) == "top2";
    out.scale = number("scale");
    out.eps = number("eps");
    out.floor = number("floor");
    out.jitter = number("jitter");
    out.weigh_input = nb::cast<bool>(router.attr("weigh_input"));
    return out;
}

using Weights = std::vector<std::shared_ptr<Weight>>;
using Forms = std::vector<std::vector<int>>;

std::vector<int32_t> copy_columns(const Vector<int32_t>& columns, int width) {
    if (static_cast<int>(columns.size()) != width) throw nb::value_error("an order has one number per column");
    std::vector<int32_t> out(columns.data(), columns.data() + width);
    for (const int32_t column : out) {
        if (column < 0 || column >= width) throw nb::value_error("an order of columns: no such column");
    }
    return out;
}

std::vector<Factor> make_factors(const Weights& weights, const Forms& forms, const std::vector<nb::object>& columns) {
    if (weights.size() != forms.size() || weights.size() != columns.size()) {
        throw nb::value_error("moe: the forms and the order of columns of each weight are needed");
    }
    std::vector<Factor> out;
    for (size_t e = 0; e < weights.size(); ++e) {
        out.push_back(make_factor(weights[e], forms[e]));
        if (!columns[e].is_none()) {
            out.back().columns = copy_columns(nb::cast<Vector<int32_t>>(columns[e]), weights[e]->n_in);
        }
    }
    return out;
}

// An operation on single rows of `width` values.
Instruction row_wise(Op op, int64_t in, const Offsets& out, int width) {
    Instruction i{};
    i.op = op;
    i.in[FORM_FLOAT] = in;
    set_offsets(i.out, out);
    i.width = i.out_width = width;
    return i;
}

CacheType cache_type(const std::string& name) {
    for (int type = 0; type < CACHE_TYPES; ++type) {
        if (name == kCacheTypes[type].name) return static_cast<CacheType>(type);
    }
    throw nb::value_error(("no type of the KV cache: " + name).c_str());
}

HeadShape head_shape(nb::handle shape, const KVCache& cache) {
    HeadShape out{};
    out.heads = nb::cast<int>(shape.attr("heads"));
    out.kv_heads = nb::cast<int>(shape.attr("kv_heads"));
    out.head_dim = nb::cast<int>(shape.attr("head_dim"));
    out.block_size = cache.block_size;
    out.type = cache.type;
    out.head_bytes = cache.head_bytes;
    out.window = nb::cast<int>(shape.attr("window"));
    out.chunk = nb::cast<int>(shape.attr("chunk"));
    out.latent = nb::cast<int>(shape.attr("latent"));
    out.scale = nb::cast<float>(shape.attr("scale"));
    out.softcap = nb::cast<float>(shape.attr("softcap"));
    out.clip = nb::cast<float>(shape.attr("clip"));
    out.stores = nb::cast<bool>(shape.attr("stores"));
    const nb::object temperature = shape.attr("temperature");
    if (!temperature.is_none()) {
        out.temperature = nb::cast<float>(temperature[0]);
        out.temperature_floor = nb::cast<float>(temperature[1]);
        out.temperature_start = nb::cast<int>(temperature[2]);
    }
    return out;
}

OwnedNorm head_norm(const nb::object& norm) {
    OwnedNorm out;
    if (norm.is_none()) return out;
    out.weight = copy_floats(nb::cast<Vector<float>>(norm.attr("weight")));
    out.norm.eps = nb::cast<float>(norm.attr("eps"));
    out.norm.over_all = nb::cast<std::string>(norm.attr("over")) == "all";
    out.norm.center = nb::cast<bool>(norm.attr("center"));
    out.norm.after = nb::cast<bool>(norm.attr("after"));
    return out;
}

Sampling read_sampling(nb::handle s) {
    const auto floats = [&](const char* name) { return nb::cast<Vector<float>>(s.attr(name)).data(); };
    const auto ints = [&](const char* name) { return nb::cast<Vector<int32_t>>(s.attr(name)).data(); };
    const Vector<int32_t> report_ptr = nb::cast<Vector<int32_t>>(s.attr("report_ptr"));
    return {floats("temperature"),
            ints("top_k"),
            floats("top_p"),
            floats("min_p"),
            nb::cast<Vector<uint64_t>>(s.attr("seed")).data(),
            ints("choice"),
            ints("position"),
            ints("target"),
            ints("logprobs"),
            floats("repetition"),
            floats("presence"),
            floats("frequency"),
            ints("seen_ptr"),
            ints("seen_ids"),
            ints("seen_counts"),
            ints("bias_ptr"),
            ints("bias_ids"),
            floats("bias_values"),
            ints("allow_ptr"),
            ints("allow_ids"),
            report_ptr.size() > 0 ? report_ptr.data() : nullptr,
            ints("report_ids")};
}

Drawn read_drawn(nb::handle d) {
    const OutMatrix<int32_t> ids = nb::cast<OutMatrix<int32_t>>(d.attr("top_ids"));
    return {nb::cast<OutVector<int32_t>>(d.attr("token")).data(),
            nb::cast<OutVector<float>>(d.attr("logprob")).data(),
            nb::cast<OutVector<int32_t>>(d.attr("rank")).data(),
            ids.data(),
            nb::cast<OutMatrix<float>>(d.attr("top_logprobs")).data(),
            nb::cast<OutVector<uint8_t>>(d.attr("ok")).data(),
            static_cast<int64_t>(ids.shape(1)),
            nb::cast<OutVector<float>>(d.attr("report_logprobs")).data()};
}

Step read_step(nb::handle arrays) {
    Step batch;
    const auto ints = [&](const char* name) { return nb::cast<Vector<int32_t>>(arrays.attr(name)); };
    const Vector<int32_t> tokens = ints("tokens"), slots = ints("slots"), rows = ints("rows");
    batch.tokens_count = static_cast<int>(tokens.size());
    batch.sequences = static_cast<int>(slots.size());
    batch.rows_count = static_cast<int>(rows.size());
    batch.tokens = tokens.data();
    batch.positions = ints("positions").data();
    batch.starts = ints("starts").data();
    batch.slots = slots.data();
    batch.rows = rows.data();
    for (nb::handle table : arrays.attr("tables")) {
        const Matrix<int32_t> ids = nb::cast<Matrix<int32_t>>(table);
        batch.tables.push_back({ids.data(), static_cast<int64_t>(ids.shape(1))});
    }
    return batch;
}

// The arrays of `arrays` are kept alive by the caller's references for the time of the call.
void run_model(Model& model, nb::handle arrays, nb::handle sampling, nb::handle drawn) {
    const Sampling parameters = read_sampling(sampling);
    const Drawn results = read_drawn(drawn);
    const Step step = read_step(arrays);
    const nb::gil_scoped_release free;
    model.run(step, &parameters, results, nullptr);
}

void run_logits(Model& model, nb::handle arrays, OutMatrix<float> out) {
    const Step step = read_step(arrays);
    if (static_cast<int>(out.shape(0)) != step.rows_count || static_cast<int>(out.shape(1)) != model.vocab()) {
        throw nb::value_error("logits: `out` must be [rows, vocabulary]");
    }
    float* values = out.data();
    const nb::gil_scoped_release free;
    model.run(step, nullptr, Drawn{}, values);
}

// One number for each form.
template <class T>
nb::tuple in_forms(const T (&numbers)[FORM_COUNT]) {
    return nb::make_tuple(numbers[FORM_FLOAT], numbers[FORM_INT8], numbers[FORM_INT16], numbers[FORM_BFLOAT16]);
}

nb::list read_profile(Model& model) {
    const Profile profile = [&] {
        const nb::gil_scoped_release free;
        return model.stop_profile();
    }();
    nb::list out;
    for (const auto& [decode, times] : {std::pair(false, &profile.prefill()), std::pair(true, &profile.decode())}) {
        for (const auto& [name, time] : *times) {
            const int64_t (&operations)[FORM_COUNT] = time.cost.operations;
            out.append(nb::make_tuple(decode, name, time.calls, time.seconds, time.cost.bytes, in_forms(operations)));
        }
    }
    return out;
}

nb::tuple read_roofline(Pool& pool) {
    const Roofline found = [&] {
        const nb::gil_scoped_release free;
        return measure_roofline(pool);
    }();
    const double (&operations)[FORM_COUNT] = found.operations_per_second;
    return nb::make_tuple(found.bytes_per_second, in_forms(operations));
}

// One phase of `starts` and `times` (Pool::each_nearby; each_local where `local`) of which the workers `absent` take
// nothing: who did each item, after how many others, and how often it was done.
void trace_phase(Pool& pool, const std::vector<int>& starts, int times, bool local, const std::vector<int>& absent,
                 OutMatrix<int32_t> out) {
    if (static_cast<int>(starts.size()) != pool.nodes() + 1 || static_cast<int>(out.shape(1)) != 3 ||
        static_cast<int64_t>(out.shape(0)) != int64_t{starts.back()} * times) {
        throw nb::value_error("trace_phase: `out` must be [items * times, 3]");
    }
    int32_t* rows = out.data();
    std::atomic<int32_t> done{0};
    const nb::gil_scoped_release free;
    pool.run([&](int worker) {
        const auto tell = [&](int item, int time) {
            int32_t* row = rows + (int64_t{time} * starts.back() + item) * 3;
            row[0] = worker;
            row[1] = done.fetch_add(1);
            std::atomic_ref<int32_t>(row[2]).fetch_add(1);
        };
        if (std::find(absent.begin(), absent.end(), worker) != absent.end()) {
            pool.barrier();
        } else if (local) {
            pool.each_local(starts, worker, [&](int item, int) { tell(item, 0); });
        } else {
            pool.each_nearby(starts, times, worker, tell);
        }
    });
}

void copy_blocks(KVCache& cache, int group, Matrix<int32_t> pairs) {
    const nb::gil_scoped_release free;
    for (size_t i = 0; i < pairs.shape(0); ++i) cache.copy_block(group, pairs.data()[2 * i], pairs.data()[2 * i + 1]);
}

void bind_program(nb::module_& m) {
    nb::class_<Program>(m, "Program")
        .def(nb::init<std::shared_ptr<Pool>, std::shared_ptr<KVCache>, int64_t>(), nb::arg("pool"), nb::arg("cache"),
             nb::arg("arena_bytes"))
        .def("embed",
             [](Program& p, const Offsets& out, std::shared_ptr<Weight> table, float scale) {
                 Instruction i{};
                 i.op = Op::Embed;
                 set_offsets(i.out, out);
                 i.out_width = table->n_in;
                 i.scale = scale;
                 i.factor.weight = std::move(table);
                 p.add(std::move(i));
             })
        .def("rotary",
             [](Program& p, int64_t out, Vector<float> inv_freq, float scale) {
                 Instruction i{};
                 i.op = Op::Rotary;
                 i.out[FORM_FLOAT] = out;
                 i.out_width = static_cast<int>(2 * inv_freq.size());
                 i.scale = scale;
                 i.first = copy_floats(inv_freq);
                 p.add(std::move(i));
             })
        .def("embed_positions",
             [](Program& p, const Offsets& out, std::shared_ptr<Weight> table, int offset, int64_t residual) {
                 Instruction i{};
                 i.op = Op::EmbedPositions;
                 set_offsets(i.out, out);
                 i.out_width = table->n_in;
                 i.offset = offset;
                 i.residual = residual;
                 i.factor.weight = std::move(table);
                 p.add(std::move(i));
             })
        .def(
            "norm",
            [](Program& p, int64_t in, const Offsets& out, Vector<float> weight, nb::object bias, float eps,
               bool center, int64_t residual) {
                Instruction i = row_wise(Op::Norm, in, out, static_cast<int>(weight.size()));
                i.eps = eps;
                i.center = center;
                i.residual = residual;
                i.first = copy_floats(weight);
                i.second = copy_floats(bias);
                p.add(std::move(i));
            },
            nb::arg("in_"), nb::arg("out"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("eps"),
            nb::arg("center"), nb::arg("residual"))
        .def(
            "activate",
            [](Program& p, int64_t in, const Offsets& out, int width, int activation, nb::object parameters,
               int64_t times) {
                Instruction i = row_wise(Op::Activate, in, out, width);
                i.activation = activation;
                i.first = copy_floats(parameters);
                i.other = times;
                p.add(std::move(i));
            },
            nb::arg("in_"), nb::arg("out"), nb::arg("width"), nb::arg("activation"), nb::arg("parameters").none(),
            nb::arg("times"))
        .def("add",
             [](Program& p, int64_t x, int64_t y, const Offsets& out, int width, float scale) {
                 Instruction i = row_wise(Op::Add, x, out, width);
                 i.other = y;
                 i.scale = scale;
                 p.add(std::move(i));
             })
        .def("blend",
             [](Program& p, int64_t x, int64_t gate, const Offsets& out, int width, int64_t residual) {
                 Instruction i = row_wise(Op::Blend, x, out, width);
                 i.other = gate;
                 i.residual = residual;
                 p.add(std::move(i));
             })
        .def("mix",
             [](Program& p, int64_t coefficients, int coefficients_width, int first, std::vector<int64_t> streams,
                const Offsets& out, int width, int64_t residual) {
                 Instruction i = row_wise(Op::Mix, kNone, out, width);
                 i.other = coefficients;
                 i.other_width = coefficients_width;
                 i.offset = first;
                 i.streams = std::move(streams);
                 i.residual = residual;
                 p.add(std::move(i));
             })
        .def("match_rms",
             [](Program& p, int64_t x, int64_t like, const Offsets& out, int width, float eps) {
                 Instruction i = row_wise(Op::MatchRms, x, out, width);
                 i.other = like;
                 i.eps = eps;
                 p.add(std::move(i));
             })
        .def("keep_top",
             [](Program& p, int64_t x, const Offsets& out, int width, float deviations) {
                 Instruction i = row_wise(Op::KeepTop, x, out, width);
                 i.deviations = deviations;
                 p.add(std::move(i));
             })
        .def("reorder",
             [](Program& p, int64_t x, const Offsets& out, Vector<int32_t> columns) {
                 const int width = static_cast<int>(columns.size());
                 Instruction i = row_wise(Op::Reorder, x, out, width);
                 i.columns = copy_columns(columns, width);
                 p.add(std::move(i));
             })
        .def("pack",
             [](Program& p, int64_t in, const Offsets& out, int width) { p.add(row_wise(Op::Pack, in, out, width)); })
        .def("headwise",
             [](Program& p, int64_t in, int64_t out, std::shared_ptr<Weight> weight, int heads) {
                 Instruction i = product(Op::Headwise, {in, kNone, kNone, kNone}, out, weight,
                                         std::vector<int>(weight->source.back() + 1, FORM_FLOAT));
                 for (const Panels& part : i.factor.weight->parts) {
                     if (part.n_out % kColumns != 0) throw nb::value_error("headwise: a part has rows beyond a panel");
                 }
                 i.heads = heads;
                 p.add(std::move(i));
             })
        .def(
            "linear",
            [](Program& p, const Offsets& in, int64_t out, std::shared_ptr<Weight> weight, std::vector<int> forms,
               nb::object bias, float scale, int64_t residual) {
                Instruction i = product(Op::Linear, in, out, std::move(weight), std::move(forms));
                i.first = copy_floats(bias);
                i.scale = scale;
                i.residual = residual;
                p.add(std::move(i));
            },
            nb::arg("in_"), nb::arg("out"), nb::arg("weight"), nb::arg("forms"), nb::arg("bias").none(),
            nb::arg("scale"), nb::arg("residual"))
        .def(
            "gated",
            [](Program& p, const Offsets& in, const Offsets& out, std::shared_ptr<Weight> weight,
               std::vector<int> forms, nb::object bias, int activation, float limit) {
                Instruction i = product(Op::Gated, in, kNone, std::move(weight), std::move(forms));
                set_offsets(i.out, out);
                i.out_width /= 2;
                i.first = copy_floats(bias);
                i.activation = activation;
                i.limit = limit;
                p.add(std::move(i));
            },
            nb::arg("in_"), nb::arg("out"), nb::arg("weight"), nb::arg("forms"), nb::arg("bias").none(),
            nb::arg("activation"), nb::arg("limit"))
        .def(
            "moe",
            [](Program& p, int64_t in, int64_t logits, const Offsets& given, const Offsets& hidden, int64_t results,
               const Offsets& out, int64_t residual, int pass_rows, const Weights& gate_up, const Forms& gate_up_forms,
               const std::vector<nb::object>& gate_up_columns, const Weights& down, const Forms& down_forms,
               const std::vector<nb::object>& down_columns, nb::object router, nb::object correction,
               nb::object gate_up_bias, nb::object down_bias, int activation, float limit) {
                auto m = std::make_shared<Mixture>();
                m->router = read_router(router, static_cast<int>(gate_up.size()));
                m->correction = copy_floats(correction);
                m->gate_up = make_factors(gate_up, gate_up_forms, gate_up_columns);
                m->down = make_factors(down, down_forms, down_columns);
                for (const Factor& factor : m->down) m->reordered = m->reordered || !factor.columns.empty();
                m->gate_up_bias = copy_floats(gate_up_bias);
                m->down_bias = copy_floats(down_bias);
                m->inner = down.at(0)->n_in;
                m->pass_rows = pass_rows;
                m->logits = logits;
                set_offsets(m->given, given);
                set_offsets(m->hidden, hidden);
                if (m->reordered && m->hidden[FORM_FLOAT] == kNone) {
                    throw nb::value_error("moe: inputs in another order need their floats");
                }
                m->results = results;
                Instruction i{};
                i.op = Op::Experts;
                i.in[FORM_FLOAT] = in;
                set_offsets(i.out, out);
                i.residual = residual;
                i.width = gate_up.at(0)->n_in;
                i.out_width = down.at(0)->n_out;
                i.activation = activation;
                i.limit = limit;
                i.mixture = std::move(m);
                p.add(std::move(i));
            },
            nb::arg("in_"), nb::arg("logits"), nb::arg("given"), nb::arg("hidden"), nb::arg("results"), nb::arg("out"),
            nb::arg("residual"), nb::arg("pass_rows"), nb::arg("gate_up"), nb::arg("gate_up_forms"),
            nb::arg("gate_up_columns"), nb::arg("down"), nb::arg("down_forms"), nb::arg("down_columns"),
            nb::arg("router"), nb::arg("correction").none(), nb::arg("gate_up_bias").none(),
            nb::arg("down_bias").none(), nb::arg("activation"), nb::arg("limit"))
        .def(
            "store_kv",
            [](Program& p, int64_t qkv, int64_t rotary, int rotary_width, int64_t out, nb::object shape, KVCache& cache,
               nb::object q_norm, nb::object k_norm, nb::object v_norm) {
                Instruction i{};
                i.op = Op::StoreKV;
                i.in[FORM_FLOAT] = qkv;
                i.rotary = rotary;
                i.width = rotary_width;
                i.out[FORM_FLOAT] = out;
                i.shape = head_shape(shape, cache);
                i.out_width = i.shape.heads * i.shape.head_dim;
                i.layer = nb::cast<int>(shape.attr("layer"));
                i.group = nb::cast<int>(shape.attr("group"));
                i.norms[0] = head_norm(q_norm);
                i.norms[1] = head_norm(k_norm);
                i.norms[2] = head_norm(v_norm);
                p.add(std::move(i));
            },
            nb::arg("qkv"), nb::arg("rotary"), nb::arg("rotary_width"), nb::arg("out"), nb::arg("shape"),
            nb::arg("cache"), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("v_norm").none())
        .def("store_latent",
             [](Program& p, std::vector<int64_t> inputs, int64_t rotary, int rotary_width, int64_t out,
                nb::object shape, KVCache& cache) {
                 if (inputs.size() != 4)
                     throw nb::value_error("store_latent: queries, key and the turned parts of both");
                 Instruction i{};
                 i.op = Op::StoreLatent;
                 i.streams = std::move(inputs);
                 i.rotary = rotary;
                 i.width = rotary_width;
                 i.out[FORM_FLOAT] = out;
                 i.shape = head_shape(shape, cache);
                 i.out_width = i.shape.heads * i.shape.head_dim;
                 i.layer = nb::cast<int>(shape.attr("layer"));
                 i.group = nb::cast<int>(shape.attr("group"));
                 p.add(std::move(i));
             })
        .def(
            "attend",
            [](Program& p, int64_t q, int64_t out, nb::object shape, KVCache& cache, nb::object sinks) {
                Instruction i{};
                i.op = Op::Attend;
                i.in[FORM_FLOAT] = q;
                i.out[FORM_FLOAT] = out;
                i.shape = head_shape(shape, cache);
                i.width = i.shape.heads * i.shape.head_dim;
                i.out_width = i.shape.heads * attend_width(i.shape);
                i.layer = nb::cast<int>(shape.attr("layer"));
                i.group = nb::cast<int>(shape.attr("group"));
                i.first = copy_floats(sinks);
                i.second = nb::cast<std::vector<float>>(shape.attr("alibi"));
                p.add(std::move(i));
            },
            nb::arg("q"), nb::arg("out"), nb::arg("shape"), nb::arg("cache"), nb::arg("sinks").none())
        .def("gather",
             [](Program& p, int64_t in, int64_t out, int width) {
                 Instruction i{};
                 i.op = Op::Gather;
                 i.in[FORM_FLOAT] = in;
                 i.out[FORM_FLOAT] = out;
                 i.width = width;
                 p.add(std::move(i));
             })
        .def(
            "logits",
            [](Program& p, const Offsets& in, int64_t out, std::shared_ptr<Weight> weight, std::vector<int> forms,
               nb::object bias, float softcap, float scale) {
                Instruction i = product(Op::Logits, in, out, std::move(weight), std::move(forms));
                i.first = copy_floats(bias);
                i.softcap = softcap;
                i.scale = scale;
                p.add(std::move(i));
            },
            nb::arg("in_"), nb::arg("out"), nb::arg("weight"), nb::arg("forms"), nb::arg("bias").none(),
            nb::arg("softcap"), nb::arg("scale"));
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // objects that live until the process ends are no leak
    m.def("missing_features", [] { return missing_for(TIER_AVX2, read_cpu()); });
    m.def("kernels", [] { return kTierNames[kernel_tier()]; });
    m.def(
        "choose_kernels",
        [](uint32_t leaf0_ebx, uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_1_eax,
           uint32_t xcr0, const std::string& wanted) {
            return kTierNames[choose_tier({leaf0_ebx, leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_1_eax, xcr0}, wanted)];
        },
        nb::arg("leaf0_ebx"), nb::arg("leaf1_ecx"), nb::arg("leaf7_ebx"), nb::arg("leaf7_ecx"), nb::arg("leaf7_1_eax"),
        nb::arg("xcr0"), nb::arg("wanted"));
    m.def("noise_bits", [](uint64_t seed, int choice, int position, Vector<int64_t> ids, OutVector<uint32_t> out) {
        const uint64_t key = noise_key(seed, choice, position);
        for (size_t i = 0; i < ids.size() && i < out.size(); ++i) out.data()[i] = noise_bits(key, ids.data()[i]);
    });
    m.def("exp", [](Vector<float> x, OutVector<float> out) {
        if (out.size() != x.size()) throw nb::value_error("exp: sizes differ");
        kernels().exp(x.data(), static_cast<int64_t>(x.size()), out.data());
    });
    m.def("unpack", unpack_weight, nb::arg("pool"), nb::arg("weight"), nb::arg("out"));
    m.def("copy_blocks", copy_blocks);
    m.def("measure_roofline", read_roofline, nb::arg("pool"));
    m.def("trace_phase", trace_phase, nb::arg("pool"), nb::arg("starts"), nb::arg("times"), nb::arg("local"),
          nb::arg("absent"), nb::arg("out"));

    nb::class_<Pool>(m, "Pool")
        .def(
            "__init__",
            [](Pool* self, int threads, std::vector<int> nodes, std::vector<std::vector<int>> cpus) {
                kernels();  // fails here, with a reason, on a CPU that lacks the instructions
                if (threads < 1 || threads > 1024) throw nb::value_error("threads must be between 1 and 1024");
                if (nodes.empty()) nodes.resize(threads);
                const auto [least, most] = std::minmax_element(nodes.begin(), nodes.end());
                if (static_cast<int>(nodes.size()) != threads || *least < 0 || *most >= threads) {
                    throw nb::value_error("nodes: one for each thread, numbered from 0");
                }
                if (!cpus.empty() && static_cast<int>(cpus.size()) != *most + 1) {
                    throw nb::value_error("cpus: some for each node");
                }
                new (self) Pool(std::move(nodes), std::move(cpus));
            },
            nb::arg("threads"), nb::arg("nodes") = std::vector<int>{},
            nb::arg("cpus") = std::vector<std::vector<int>>{})
        .def_prop_ro("threads", &Pool::threads)
        .def_prop_ro("nodes", &Pool::nodes);
    nb::class_<Store>(m, "Store").def(nb::init<>());
    nb::class_<Weight>(m, "Weight")
        .def_ro("n_out", &Weight::n_out)
        .def_ro("n_in", &Weight::n_in)
        .def_ro("bytes", &Weight::bytes)
        .def_prop_ro("owners", [](const Weight& weight) {
            std::vector<std::pair<int, int>> owners;
            for (size_t part = 0; part < weight.parts.size(); ++part) {
                owners.emplace_back(weight.first[part], weight.node[part]);
            }
            return owners;
        });
    m.def("allocate", allocate_weight, nb::arg("pool"), nb::arg("store"), nb::arg("parts"), nb::arg("n_in"));
    m.def("touch_pages", touch_pages, nb::arg("pool"), nb::arg("weight"), nb::arg("part"),
          nb::call_guard<nb::gil_scoped_release>());
    m.def("pack", pack_source, nb::arg("pool"), nb::arg("weight"), nb::arg("part"), nb::arg("first_row"),
          nb::arg("stored"), nb::arg("packers") = nb::none());
    nb::class_<KVCache>(m, "KVCache")
        .def(
            "__init__",
            [](KVCache* self, int kv_heads, int head_dim, int latent, const std::string& dtype, int block_size,
               const std::vector<int>& blocks, const std::vector<int>& group_of,
               const std::vector<std::vector<float>>& scales, const std::vector<int>& memory_nodes) {
                new (self) KVCache(kv_heads, head_dim, latent, cache_type(dtype), block_size, blocks, group_of, scales,
                                   memory_nodes);
            },
            nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("latent"), nb::arg("dtype"), nb::arg("block_size"),
            nb::arg("blocks"), nb::arg("group_of"), nb::arg("scales"), nb::arg("memory_nodes"))
        .def_prop_ro("bytes", &KVCache::bytes);
    bind_program(m);
    nb::class_<Model>(m, "Model")
        .def(nb::init<std::shared_ptr<Pool>, std::shared_ptr<KVCache>, std::shared_ptr<Program>,
                      std::shared_ptr<Program>, int64_t, int64_t, int64_t, int, int, int, int>(),
             nb::arg("pool"), nb::arg("cache"), nb::arg("body"), nb::arg("head"), nb::arg("hidden"), nb::arg("input"),
             nb::arg("logits"), nb::arg("width"), nb::arg("vocab"), nb::arg("max_tokens"), nb::arg("head_rows"))
        .def("run", run_model, nb::arg("batch"), nb::arg("sampling"), nb::arg("drawn"))
        .def("raw_logits", run_logits, nb::arg("batch"), nb::arg("out"))
        .def("start_profile", &Model::start_profile, nb::call_guard<nb::gil_scoped_release>())
        .def("stop_profile", read_profile)
        .def_prop_ro("bytes", &Model::bytes);
}
