#include "attend_plan.h"

#include <algorithm>

#include "program.h"

namespace octavo {

namespace {

constexpr int kSharePieces = 8;  // a piece is at most this part of a thread's share of the step
constexpr int kRowCost = 8;      // reading the keys and values of a token costs about as much as so many rows

AttendPiece whole_piece(const Step& step, const HeadShape& shape, int sequence, int token, int tokens) {
    const int position = step.positions[token];
    AttendPiece piece{};
    piece.sequence = sequence;
    piece.token = token;
    piece.tokens = tokens;
    piece.first_chunk = piece.begin_chunk = attend_begin(shape, position) / kChunkTokens;
    piece.chunks = piece.all_chunks = (position + tokens - 1) / kChunkTokens + 1 - piece.first_chunk;
    piece.pieces = 1;
    const int seen = position + tokens - attend_begin(shape, position);
    piece.cost = int64_t{tokens * (shape.heads / shape.kv_heads) + kRowCost} * seen;
    return piece;
}

}  // namespace

AttendPlan make_attend_plan(const HeadShape& shape, int tokens, int threads) {
    AttendPlan plan;
    plan.shape = shape;
    // No more than kSharePieces * threads items cost more than that part of all, so no more are cut.
    const int cut = kSharePieces * threads + shape.kv_heads;
    plan.pieces.reserve(tokens + 2 * cut);
    plan.left = std::make_unique<std::atomic<int>[]>(cut);
    return plan;
}

void plan_attention(const Step& step, int threads, int64_t capacity, AttendPlan& plan) {
    const HeadShape& shape = plan.shape;
    const int length = attend_tokens(shape);
    std::vector<AttendPiece>& pieces = plan.pieces;
    pieces.clear();
    int64_t total = 0;
    for (int s = 0; s < step.sequences; ++s) {
        for (int t = step.starts[s]; t < step.starts[s + 1]; t += length) {
            pieces.push_back(whole_piece(step, shape, s, t, std::min(length, step.starts[s + 1] - t)));
            total += pieces.back().cost;
        }
    }
    const int64_t largest = std::max<int64_t>(1, total * shape.kv_heads / (int64_t{kSharePieces} * threads));
    int64_t used = 0;
    int counters = 0;
    const size_t spans = threads > 1 ? pieces.size() : 0;
    for (size_t i = 0; i < spans; ++i) {
        AttendPiece piece = pieces[i];
        const int parts = static_cast<int>(std::min<int64_t>(piece.all_chunks, (piece.cost - 1) / largest + 1));
        const int64_t partial = attend_partial(piece.tokens * (shape.heads / shape.kv_heads), attend_width(shape));
        const int64_t needed = shape.kv_heads * piece.all_chunks * partial;
        if (parts < 2 || used + needed > capacity) continue;
        const int64_t cost = piece.cost;
        piece.pieces = parts;
        piece.partials = used;
        piece.counter = counters;
        used += needed;
        for (int head = 0; head < shape.kv_heads; ++head) plan.left[counters++] = parts;
        for (int part = 0; part < parts; ++part) {
            const int first = piece.all_chunks * part / parts;
            piece.chunks = piece.all_chunks * (part + 1) / parts - first;
            piece.first_chunk = piece.begin_chunk + first;
            piece.cost = cost * piece.chunks / piece.all_chunks;
            if (part == 0) {
                pieces[i] = piece;
            } else {
                pieces.push_back(piece);
            }
        }
    }
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const AttendPiece& a, const AttendPiece& b) { return a.cost > b.cost; });
}

}  // namespace octavo
