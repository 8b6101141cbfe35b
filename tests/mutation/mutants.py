"""Mistakes to put into the library, one at a time; `run.py` looks whether the tests notice.

Each row is a plausible slip: a wrong factor or axis, a missing term, an off-by-one, a check that no longer triggers.
They were chosen by reading the source, not the tests. `before` occurs exactly once in the file, and `tests` are the
files that cover it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`name` says what goes wrong; `file` is a path under src/lapwing, `tests` are paths under tests."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


LINALG = (
    Mutant(
        "the bias of a Kronecker block takes the weight's prior precision",
        "linalg/kronecker/structure.py",
        "delta = deltas[min(i, len(deltas) - 1)]",
        "delta = deltas[0]",
        ("linalg/test_kronecker.py", "linalg/test_singular.py", "linalg/test_precision.py"),
    ),
    Mutant(
        "rows of a weight with many positions are not rotated by the output side's eigenvectors",
        "linalg/kronecker/rotation.py",
        "None if rows_before else part.row_vectors",
        "None",
        ("linalg/test_kronecker.py", "linalg/test_sweep.py", "linalg/test_precision.py", "estimate/test_ekfac.py"),
    ),
    Mutant(
        "equal eigenvalues of the output side are no longer averaged over",
        "linalg/kronecker/corrected.py",
        "found.append(values if self.row_ties is None else _means(values.mT, self.row_ties).mT)",
        "found.append(values)",
        ("linalg/test_kronecker.py", "estimate/test_ekfac.py", "linalg/test_curvature.py"),
    ),
    Mutant(
        "dual curvatures that were scaled are added with the scale, not its root, on the rows",
        "linalg/dual.py",
        "each._checked_scale().sqrt()",
        "each._checked_scale()",
        ("linalg/test_dual.py",),
    ),
    Mutant(
        "a scaled low-rank curvature forgets its scale when the prior is added",
        "linalg/low_rank.py",
        "return self.multiple.of.dual * self.multiple.scale",
        "return self.multiple.of.dual",
        ("linalg/test_dual.py",),
    ),
    Mutant(
        "parts of blocks are not put in the order of the parameters",
        "linalg/blocks.py",
        "[piece for _, piece in sorted(pieces, key=lambda each: each[0])]",
        "[piece for _, piece in pieces]",
        ("linalg/test_precision.py",),
    ),
    Mutant(
        "a token that occurs several times in a data point is counted as often in the diagonal of a table",
        "linalg/rows.py",
        "squares = merged.square().sum(0) / occurrences",
        "squares = merged.square().sum(0)",
        ("linalg/test_kronecker.py", "estimate/test_ekfac.py"),
    ),
    Mutant(
        "an interval that lies within another cuts off the end of the larger one",
        "linalg/layout.py",
        "max(merged[-1][1], stop)",
        "stop",
        ("linalg/test_rows.py", "linalg/test_dual.py", "estimate/test_estimators.py"),
    ),
    Mutant(
        "eigenvalues of the output side that are zero are left out of a sweep over precisions",
        "linalg/kronecker/sweep.py",
        "(g_all * a_zero + g_zero * a_rest)",
        "(g_all * a_zero)",
        ("linalg/test_sweep.py",),
    ),
)

ESTIMATE = (
    Mutant(
        "a weight that is used with two different biases is taken for one with a single bias",
        "estimate/kronecker.py",
        "p.layout.bias is not None}) > 1:",
        "p.layout.bias is not None}) > 2:",
        ("estimate/test_kronecker.py", "estimate/test_exact_blocks.py"),
    ),
    Mutant(
        "corrected eigenvalues in a given basis start from those of the basis, not from zero",
        "estimate/corrected_kronecker.py",
        "basis.with_values([torch.zeros_like(part.values) for part in basis.parts])",
        "basis.with_values([part.values.clone() for part in basis.parts])",
        ("estimate/test_ekfac.py",),
    ),
    Mutant(
        "the Hessian at the outputs is taken for diagonal where a single entry agrees",
        "estimate/propagated/kfra.py",
        "<= rounding).all()",
        "<= rounding).any()",
        ("estimate/test_kfra.py",),
    ),
    Mutant(
        "the joint moments of two slopes of one operation are transposed",
        "estimate/propagated/recursion/steps.py",
        "(b_all.mT @ c_all)",
        "(c_all.mT @ b_all)",
        ("estimate/test_kfra.py",),
    ),
    Mutant(
        "drawn cotangents are summed before they are squared",
        "estimate/propagated/diagonal.py",
        "chunk.square().sum(0)",
        "chunk.sum(0).square()",
        ("estimate/test_propagated.py", "estimate/test_projections.py", "laplace/test_propagated_diag.py"),
    ),
    Mutant(
        "parameters without a rule get their variances twice beside a cut",
        "estimate/propagated/mixed.py",
        "part[where] = everywhere[where]",
        "part[where] += everywhere[where]",
        ("estimate/test_mixed.py",),
    ),
    Mutant(
        "the reservoir of a subset favours later data points by one place",
        "estimate/dual_rows.py",
        "int(chance * (seen + number + 1))",
        "int(chance * (seen + number))",
        ("estimate/test_dual.py",),
    ),
    Mutant(
        "every pass of the subspace iteration draws other cotangents",
        "estimate/leading_eigenpairs.py",
        "generator.set_state(state)",
        "pass",
        ("estimate/test_dual.py", "estimate/test_estimators.py"),
    ),
    Mutant(
        "the same token in different data points is summed before it is squared",
        "linalg/rows.py",
        "torch.arange(batch, device=self.index.device).unsqueeze(1) * table + self.index",
        "torch.zeros_like(self.index) + self.index",
        ("estimate/test_estimators.py",),
    ),
    Mutant(
        "closed forms of the last layer do not ask whether its outputs are the likelihood's classes",
        "estimate/last_layer.py",
        "return last.shape[-1] == linear_map.layout.rows and torch.equal(last.flatten(), index.flatten())",
        "return last.shape[-1] == linear_map.layout.rows",
        ("estimate/test_last_layer.py",),
    ),
    Mutant(
        "targets are drawn at positions that have none",
        "estimate/cotangents.py",
        "drawn = [target.where(observed, y) for target in drawn]",
        "drawn = list(drawn)",
        ("estimate/test_cotangents.py", "estimate/test_estimators.py"),
    ),
)

TANGENT = (
    Mutant(
        "memory of cotangents that others still need is written to",
        "tangent/pullback.py",
        "free = len(given) == 1 and arriving.free(*given.values())",
        "free = len(given) == 1",
        ("tangent/test_pullback.py",),
    ),
    Mutant(
        "a cotangent is added to memory that the same operation has given to another of its inputs",
        "tangent/pullback.py",
        "            arriving.hold(values)\n    for",
        "            pass\n    for",
        ("tangent/test_pullback.py",),
    ),
    Mutant(
        "windows of a pool that overlap are taken for ones that do not",
        "tangent/pullback.py",
        "all(size <= by for size, by",
        "all(size >= by for size, by",
        ("tangent/test_pullback.py",),
    ),
    Mutant(
        "a convolution's cotangents of further data points are those of the first ones",
        "tangent/pullback.py",
        "values[part] = back(folded[part])",
        "values[part] = back(folded[: part.stop - part.start])",
        ("tangent/test_pullback.py",),
    ),
    Mutant(
        "positions of further batches are missing from a convolution's input factor",
        "tangent/patch_products.py",
        "self.points += other.points",
        "self.points += 0",
        ("tangent/test_patch_products.py",),
    ),
    Mutant(
        "a piece of an image's lines that one pair of offsets does not meet is counted for it",
        "tangent/patch_products.py",
        "if a <= cut[0] and cut[1] <= a + out",
        "if a <= cut[0]",
        ("tangent/test_patch_products.py",),
    ),
    Mutant(
        "products of a transposed convolution keep the order of its kernel",
        "tangent/patch_products.py",
        ".flip(1).flatten()",
        ".flatten()",
        ("tangent/test_patch_products.py",),
    ),
    Mutant(
        "a token that is joined behind the data has the gradients of the first position",
        "tangent/uses.py",
        "grad.narrow(1 + part[0], part[1], part[2] - part[1])",
        "grad.narrow(1 + part[0], 0, part[2] - part[1])",
        ("tangent/test_recorder.py",),
    ),
    Mutant(
        "drawn cotangents are drawn for parts of a batch",
        "estimate/data_pass.py",
        "_Parts(tangent, together and repeatable(cotangents))",
        "_Parts(tangent, together)",
        ("estimate/test_patches.py",),
    ),
    Mutant(
        "the product of the two inputs of a bilinear layer has its axes exchanged",
        "tangent/rules.py",
        "(a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)",
        "(a.unsqueeze(-2) * b.unsqueeze(-1)).flatten(-2)",
        ("tangent/test_recorder.py", "estimate/test_exact_blocks.py"),
    ),
    Mutant(
        "samples that are eight places apart are not told apart by the probe",
        "tangent/probe.py",
        "for place in range(len(value)):",
        "for place in range(1):",
        ("tangent/test_carried_over.py", "tangent/test_adversarial.py", "tangent/test_routing.py"),
    ),
    Mutant(
        "sizes and axes of operations are no part of what two batches must have in common",
        "tangent/record.py",
        "hash((self.record.trace, name, *sizes))",
        "hash((self.record.trace, name))",
        ("tangent/test_recorder.py", "tangent/test_adversarial.py", "tangent/test_carried_over.py"),
    ),
    Mutant(
        "every layer of a recurrence starts from the first layer's state",
        "tangent/recurrent.py",
        "each[chain]) for each in start)",
        "each[0]) for each in start)",
        ("tangent/test_recurrent.py",),
    ),
    Mutant(
        "the output need not be what the last layer makes of its features",
        "tangent/features.py",
        "if not explained or not (use.is_whole(output) or explains(layer, features, output)):",
        "if not explained:",
        ("tangent/test_features.py",),
    ),
    Mutant(
        "parameters that hide behind a weight made of others are not looked for",
        "tangent/paths.py",
        "found |= _reached((source.edge.node, source.edge.output_nr), leaves, inner, {}) - source.names",
        "found |= _reached((source.edge.node, source.edge.output_nr), {}, {}, {}) - source.names",
        ("tangent/test_paths.py",),
    ),
    Mutant(
        "channels of a grouped convolution are dealt out to the groups in turn",
        "tangent/convolution.py",
        "y.reshape(r, n, groups, c // groups, -1).permute(0, 1, 4, 2, 3)",
        "y.reshape(r, n, c // groups, groups, -1).permute(0, 1, 4, 3, 2)",
        ("estimate/test_kronecker.py", "tangent/test_convolution.py"),
    ),
    Mutant(
        "an operation without a rule need not prove that it works entry by entry",
        "tape/rules/kinds.py",
        "return [(source, given[0] * slope.square().to(given[0].dtype))] if close else None",
        "return [(source, given[0] * slope.square().to(given[0].dtype))]",
        ("tape/test_rules.py",),
    ),
)

ABOVE = (
    Mutant(
        "the search for a prior by its slope leaves out the temperature",
        "evidence/tuners.py",
        "loss = -here.log_marginal(trial, level, temperature)",
        "loss = -here.log_marginal(trial, level)",
        ("evidence", "laplace/test_tuning.py"),
    ),
    Mutant(
        "covariances count once, not twice, in the variance of a difference of logits",
        "distributions/gaussian_logits.py",
        "- 2 * covariance",
        "- covariance",
        ("distributions/test_gaussian_logits.py", "predictive/test_predictions.py"),
    ),
    Mutant(
        "the variance of a log-noise is believed however large it is",
        "distributions/scale_mixture.py",
        "of_level.clamp(0, SPREAD)",
        "of_level.clamp_min(0)",
        ("distributions/test_scale_mixture.py", "tables/test_noise.py"),
    ),
    Mutant(
        "negative numbers have the probability of zero in the distribution function of counts",
        "distributions/poisson_lognormal.py",
        "torch.where(y < 0, 0.0, above_zero)",
        "above_zero",
        ("distributions/test_poisson_lognormal.py",),
    ),
    Mutant(
        "parts of a batch are all met with the outputs of the first part",
        "predictive/candidates.py",
        "at += part.batch",
        "at += 0",
        ("evidence/test_grid.py", "predictive/test_predictions.py"),
    ),
    Mutant(
        "positions without a target count in the diagonal of the softmax's Hessian",
        "likelihoods/categorical.py",
        "return p * (1 - p) if kept is None else (p * (1 - p)).where(kept.unsqueeze(-1), 0.0)",
        "return p * (1 - p)",
        ("likelihoods",),
    ),
    Mutant(
        "the comparison of a model with its copy looks at the same numbers every time",
        "laplace/identity.py",
        "turn = self.turn = (self.turn + 1) % len(self.windows)",
        "turn = self.turn",
        ("laplace/test_identity.py",),
    ),
    Mutant(
        "a fit that goes on from a checkpoint draws from the start of its generator again",
        "laplace/checkpoint.py",
        'generator.set_state(tensors["generator"])',
        'tensors["generator"]',
        ("laplace/test_checkpoint.py",),
    ),
    Mutant(
        "an evidence that cannot be computed leaves its noise level behind",
        "laplace/base.py",
        "            self.hyper = before\n            raise\n",
        "            self.hyper = replace(before, sigma_noise=self.sigma_noise)\n            raise\n",
        ("laplace/test_face.py", "laplace/test_linear_gaussian.py"),
    ),
    Mutant(
        "draws are scored by the mean of their log-densities, not the log of their mean density",
        "laplace/tuning.py",
        "(torch.logsumexp(each, 0) - log(len(each))).sum()",
        "each.mean(0).sum()",
        ("laplace/test_tuning.py",),
    ),
    Mutant(
        "the subset of a Gaussian process is drawn from the same seed always",
        "laplace/variants/functional.py",
        "torch.Generator().manual_seed(self.seed)",
        "torch.Generator().manual_seed(0)",
        ("laplace/test_linear_gaussian.py", "laplace/test_independent_outputs.py"),
    ),
    Mutant(
        "a last layer is accepted that the output is no linear function of",
        "laplace/variants/last_layer.py",
        "        if not linear:\n            raise refused\n",
        "",
        ("laplace/test_heads.py", "laplace/test_face.py"),
    ),
    Mutant(
        "the state of another sub-network of the same size is accepted",
        "laplace/state.py",
        "not torch.equal(index.cpu(), own.cpu())",
        "len(index) != len(own)",
        ("laplace/test_face.py", "laplace/test_files.py"),
    ),
    Mutant(
        "the prior pulls twice as hard in training",
        "training/prior_term.py",
        "alpha=scale * precision)",
        "alpha=2 * scale * precision)",
        ("training",),
    ),
    Mutant(
        "the density of a grouped prior counts its constant once per group, not per weight",
        "priors.py",
        "self.size * log(2 * pi)",
        "len(self.precisions) * log(2 * pi)",
        ("test_params.py", "evidence"),
    ),
    Mutant(
        "the first entry of a tensor is counted to the tensor before it",
        "params.py",
        "torch.searchsorted(ends, positions, right=True)",
        "torch.searchsorted(ends, positions)",
        ("test_params.py", "test_subnetwork.py"),
    ),
    Mutant(
        "a confidence at the edge of two bins is counted to the upper one",
        "metrics.py",
        "(confidence.double() * bins).ceil().long().clamp(1, bins) - 1",
        "(confidence.double() * bins).floor().long().clamp(0, bins - 1)",
        ("test_metrics.py",),
    ),
    Mutant(
        "a file may go on after its end",
        "serialize/files.py",
        "if size != end:",
        "if size < end:",
        ("serialize",),
    ),
)

APPLICATIONS = (
    Mutant(
        "factors of a calibration are kept whatever they gain",
        "laplace/calibration.py",
        "if not gain > max(1 + la.has_noise, errors * error):",
        "if not gain > errors * error:",
        ("laplace/test_calibration.py", "laplace/test_attach.py"),
    ),
    Mutant(
        "a conformal set may be empty",
        "tables/conformal.py",
        "return (1 - probabilities <= bound) | (probabilities == probabilities.max(1, keepdim=True).values)",
        "return 1 - probabilities <= bound",
        ("tables/test_conformal.py",),
    ),
    Mutant(
        "the first rows of a long table are used, not random ones",
        "tables/targets.py",
        "    random.shuffle(rows)\n    rows = rows[:most]\n",
        "    rows = rows[:most]\n    random.shuffle(rows)\n",
        ("tables/test_table.py",),
    ),
    Mutant(
        "chunks of a table are merged with the wrong count in the spread between them",
        "tables/encoder.py",
        "step**2 * self.count * share",
        "step**2 * count * share",
        ("tables/test_table.py",),
    ),
    Mutant(
        "the first fifty words alone decide how dates are written",
        "tables/columns.py",
        "self.formats = [form for form in self.formats if _dates(rest, form).notna().all()]",
        "self.formats = list(self.formats)",
        ("tables/test_table.py", "tables/test_bad_tables.py"),
    ),
    Mutant(
        "what an unknown value might have been adds nothing to the variance",
        "tables/bundle.py",
        "mean[1] += said[0].var(1, correction=min(1, versions.shape[1] - 1))",
        "mean[1] += 0.0",
        ("tables/test_bad_tables.py",),
    ),
    Mutant(
        "the evidence of standardised targets is moved to their own unit the wrong way",
        "tables/estimators.py",
        "self.log_marginal_likelihood_ -= len(y)",
        "self.log_marginal_likelihood_ += len(y)",
        ("tables/test_estimators.py",),
    ),
    Mutant(
        "lines with too many fields are read where only some columns are asked for",
        "tables/reading.py",
        "kept = chosen if checked else None",
        "kept = chosen",
        ("tables/test_bad_tables.py", "tables/test_table.py"),
    ),
)

SECOND_BELOW = (
    # -- linalg (6) ---------------------------------------------------------------------------------------------------
    # Kronecker(..., factored_damping=True).with_prior(d), kflr(factored_damping=True): the larger share of the damping
    # goes to the wrong factor, wherever tr A / dim A differs from tr G / dim G; logdet, solve and variances change
    Mutant(
        "factored damping gives each factor the share of the other one",
        "linalg/kronecker/factors.py",
        "return root * omega, root / omega",
        "return root / omega, root * omega",
        (
            "linalg/test_kronecker.py",
            "linalg/test_precision.py",
            "linalg/test_singular.py",
            "linalg/test_curvature.py",
            "estimate/test_kronecker.py",
            "laplace/test_face.py",
            "laplace/test_known_names.py",
        ),
    ),
    # (Dual * scale).with_prior(d).draw(n), samples of a functional or low-rank posterior with sigma_noise or
    # temperature other than 1: their covariance is not the inverse of the precision
    Mutant(
        "draws from a scaled dual precision take the scale for its root",
        "linalg/dual.py",
        "root = self.scale.sqrt() * self.roots",
        "root = self.scale * self.roots",
        (
            "linalg/test_dual.py",
            "linalg/test_precision.py",
            "estimate/test_dual.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_independent_outputs.py",
            "predictive/test_predictions.py",
        ),
    ),
    # Dense(H).with_prior(vector).variance(), posterior_variance of a full Laplace with a prior per tensor or entry
    Mutant(
        "variances under a prior that differs between parameters are summed along the wrong axis of the root",
        "linalg/dense.py",
        "return self.root.square().sum(1)",
        "return self.root.square().sum(0)",
        (
            "linalg/test_precision.py",
            "linalg/test_curvature.py",
            "linalg/test_singular.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_face.py",
            "evidence/test_linear_gaussian.py",
        ),
    ),
    # dual(...).with_prior(1.0) or .gram of a network that looks two inputs up in one embedding table (two pieces of
    # the same kind in one block), or that uses one weight with and without its bias: products overwrite each other
    Mutant(
        "of a parameter that is used twice in the same way only the last product of rows counts",
        "linalg/row_products.py",
        "if any(len(part) > 1 for part in (*ours.parts, *theirs.parts)):",
        "if any(len(part) > 2 for part in (*ours.parts, *theirs.parts)):",
        (
            "linalg/test_dual.py",
            "linalg/test_rows.py",
            "linalg/test_precision.py",
            "estimate/test_dual.py",
            "estimate/test_estimators.py",
            "laplace/test_independent_outputs.py",
            "test_layers.py",
        ),
    ),
    # kflr(..., joint_bias=False).with_prior(1.0), Laplace(hessian_structure="kron", bias="separate"): logdet and
    # variances are those of the joint block, while dense() and sweep() still drop the correlation
    Mutant(
        "weight and bias are decomposed together with equal priors although joint_bias is off",
        "linalg/kronecker/structure.py",
        "joint = self.joint_bias and equal",
        "joint = equal",
        (
            "linalg/test_kronecker.py",
            "linalg/test_precision.py",
            "linalg/test_curvature.py",
            "linalg/test_sweep.py",
            "estimate/test_kronecker.py",
            "laplace/test_face.py",
            "laplace/test_linear_gaussian.py",
        ),
    ),
    # any estimator of a network with einsum("bk,kij->bij", x, w): the weight's axes are permuted by a 3-cycle, whose
    # inverse is another one. Swaps of two axes (linear, transposed convolutions) are their own inverse
    Mutant(
        "rows of a weight go back to the order of its axes by the permutation itself, not its inverse",
        "linalg/layout.py",
        "back = sorted(range(len(self.order)), key=self.order.__getitem__)",
        "back = self.order",
        (
            "linalg/test_rows.py",
            "linalg/test_kronecker.py",
            "linalg/test_curvature.py",
            "tangent/test_recorder.py",
            "tangent/test_convolution.py",
            "estimate/test_exact_blocks.py",
            "estimate/test_estimators.py",
            "test_layers.py",
        ),
    ),
    # -- estimate (7) -------------------------------------------------------------------------------------------------
    # kfra(...) of a residual network y = x + f(x) behind another layer: x is alive beside f and its input, and the
    # second of the two mixed terms is lost
    Mutant(
        "a value that runs past a layer and through it gets one of the two cross terms",
        "estimate/propagated/recursion/walk.py",
        "                if u in number and v in old:",
        "                elif u in number and v in old:",
        ("estimate/test_kfra.py", "laplace/test_recursive.py", "test_layers.py", "estimate/test_kronecker.py"),
    ),
    # kfra(...) of a network with nn.Embedding(padding_idx=...), on two batches or more: the output factor of the table
    Mutant(
        "positions of a table that are no padding are counted in the last batch alone",
        "estimate/propagated/recursion/layers.py",
        "self.seen = seen if self.seen is None else self.seen + seen",
        "self.seen = seen",
        ("estimate/test_kfra.py", "laplace/test_recursive.py", "test_layers.py", "estimate/test_kronecker.py"),
    ),
    # hessian(tangent, ..., structure="diagonal") where the rows need several chunks (a small Tangent.budget, or many
    # parameters): entries after the first chunk are off-diagonal ones
    Mutant(
        "the diagonal of the Hessian is read from the first columns in every chunk of rows",
        "estimate/exact_hessian.py",
        "torch.arange(part.start, part.stop)",
        "torch.arange(len(rows))",
        (
            "estimate/test_estimators.py",
            "estimate/test_exact_blocks.py",
            "linalg/test_memory.py",
            "laplace/test_face.py",
            "laplace/test_linear_gaussian.py",
            "test_layers.py",
        ),
    ),
    # full(..., cotangents=projections(samples=4)), Laplace(estimator="projection", backend_kwargs={"mc_samples": 4}):
    # the curvature is four times too small; with one draw nothing changes
    Mutant(
        "projections are divided by the number of draws, not by its root",
        "estimate/cotangents.py",
        "torch.stack([drawn() for _ in range(part.start, part.stop)]) / samples**0.5",
        "torch.stack([drawn() for _ in range(part.start, part.stop)]) / samples",
        (
            "estimate/test_projections.py",
            "estimate/test_cotangents.py",
            "estimate/test_estimators.py",
            "estimate/test_propagated.py",
            "laplace/test_propagated_diag.py",
            "laplace/test_face.py",
        ),
    ),
    # full, blocks, kflr, last-layer kron with a matrix of 512 rows and more (or 193, and 512 rows of data at once):
    # what lies below the diagonal stays zero, since only wide products are made by their upper half
    Mutant(
        "a large symmetric sum is mirrored within its tiles only",
        "estimate/symmetric_sums.py",
        "        upper[..., stop:, start:stop] = upper[..., start:stop, stop:].mT\n",
        "",
        (
            "estimate/test_symmetric_sums.py",
            "estimate/test_estimators.py",
            "estimate/test_exact_blocks.py",
            "estimate/test_kronecker.py",
            "estimate/test_last_layer.py",
            "estimate/test_ekfac.py",
            "estimate/test_kfra.py",
            "linalg/test_memory.py",
            "test_claims.py",
        ),
    ),
    # kflr(..., sharing="reduce") of a convolution or of sequences: the curvature is T^2 times too large
    Mutant(
        "reduced weight sharing sums the inputs over positions instead of averaging them",
        "estimate/accumulators.py",
        "right.mean(1, keepdim=True)",
        "right.sum(1, keepdim=True)",
        (
            "estimate/test_kronecker.py",
            "estimate/test_kfra.py",
            "estimate/test_ekfac.py",
            "estimate/test_last_layer.py",
            "laplace/test_face.py",
            "test_layers.py",
        ),
    ),
    # ekfac(tangent, likelihood, loader) with a loader that gives fewer batches the second time: an error before
    Mutant(
        "a second pass over less data than the first is accepted",
        "estimate/data_pass.py",
        "elif count != self.first:",
        "elif count > self.first:",
        (
            "estimate/test_ekfac.py",
            "estimate/test_estimators.py",
            "estimate/test_dual.py",
            "laplace/test_loaders.py",
            "laplace/test_checkpoint.py",
            "test_bad_input.py",
        ),
    ),
    # -- likelihoods (4) ----------------------------------------------------------------------------------------------
    # Poisson().check(f, y) and any fit with it: y = 1.5 was refused
    Mutant(
        "counts need not be whole numbers",
        "likelihoods/poisson.py",
        "return ~((y >= 0) & (y == y.floor()) & torch.isfinite(y))",
        "return ~((y >= 0) & torch.isfinite(y))",
        (
            "likelihoods/test_likelihood_errors.py",
            "likelihoods/test_likelihood_properties.py",
            "likelihoods/test_likelihood_derivatives.py",
            "likelihoods/test_likelihood_sampling.py",
            "distributions/test_poisson_lognormal.py",
            "test_bad_input.py",
        ),
    ),
    # Categorical().log_prob(f.bfloat16(), y), hessian_sqrt, ...: computed and returned in bfloat16, with 8 bits
    Mutant(
        "outputs in bfloat16 are computed as they are",
        "likelihoods/base.py",
        "return f.float() if f.dtype.itemsize < 4 else f",
        "return f.float() if f.dtype == torch.float16 else f",
        (
            "likelihoods/test_likelihood_derivatives.py",
            "likelihoods/test_likelihood_errors.py",
            "likelihoods/test_likelihood_properties.py",
            "likelihoods/test_likelihood_sampling.py",
            "laplace/test_surroundings.py",
            "laplace/test_adversarial.py",
        ),
    ),
    # HeteroscedasticGaussian().sample(f) and with it monte_carlo cotangents, for log-variances other than 0
    Mutant(
        "targets with a learned noise are drawn with the variance for a deviation",
        "likelihoods/heteroscedastic.py",
        "return mean + (0.5 * log_variance).exp() * noise",
        "return mean + log_variance.exp() * noise",
        (
            "likelihoods/test_likelihood_sampling.py",
            "likelihoods/test_likelihood_properties.py",
            "likelihoods/test_likelihood_derivatives.py",
            "estimate/test_cotangents.py",
            "tables/test_noise.py",
            "distributions/test_scale_mixture.py",
        ),
    ),
    # from_function(nll).hessian_sqrt(f, y), psd_hessian: a Hessian with one NaN among numbers was a DataError that
    # names the data point, and is now decomposed
    Mutant(
        "a Hessian of a user's loss is refused only if none of its entries is finite",
        "likelihoods/differentiated.py",
        "torch.isfinite(hessian).flatten(1).all(1)",
        "torch.isfinite(hessian).flatten(1).any(1)",
        (
            "likelihoods/test_likelihood_errors.py",
            "likelihoods/test_likelihood_properties.py",
            "likelihoods/test_likelihood_derivatives.py",
            "laplace/test_rewards.py",
            "test_bad_input.py",
        ),
    ),
    # -- predictive (3) -----------------------------------------------------------------------------------------------
    # bridge_norm(mean, covariance), la(x, link_approx="bridge_norm")
    Mutant(
        "the normalised bridge divides the mean of the logits by the factor of their variance",
        "distributions/gaussian_logits.py",
        "mean, variance = mean / scale.sqrt(), variance / scale",
        "mean, variance = mean / scale, variance / scale",
        (
            "distributions/test_gaussian_logits.py",
            "predictive/test_predictions.py",
            "evidence/test_grid.py",
            "laplace/test_face.py",
            "laplace/test_tuning.py",
            "test_claims.py",
        ),
    ),
    # la(x, pred_type="nn", link_approx="mc") of a SubnetLaplace: weights inside the mask are mean + draw
    Mutant(
        "sampled weights of a sub-network are added to the fitted ones instead of taking their place",
        "tangent/model.py",
        "space.expand(theta - space.values(self.model))",
        "space.expand(theta)",
        (
            "predictive/test_predictions.py",
            "test_subnetwork.py",
            "laplace/test_face.py",
            "laplace/test_adversarial.py",
            "laplace/test_linear_gaussian.py",
            "test_layers.py",
        ),
    ),
    # validation.grid(..., Gaussian(sigma=[0.5, 2.0]), ...) or pseudo_data: scores, and predictions given to a score
    Mutant(
        "held-out scores of a regression leave out the noise of the likelihood itself",
        "likelihoods/gaussian.py",
        "return f, (own * sigma).square().expand(f.shape)",
        "return f, (own * sigma / own).square().expand(f.shape)",
        (
            "evidence/test_grid.py",
            "predictive/test_predictions.py",
            "laplace/test_tuning.py",
            "laplace/test_linear_gaussian.py",
            "tables/test_noise.py",
        ),
    ),
    # -- evidence (2) -------------------------------------------------------------------------------------------------
    # Evidence(..., noise_power=4).precision(prior, sigma), Laplace(estimator="empirical") in regression with
    # sigma_noise other than 1: posterior and evidence
    Mutant(
        "the noise divides an empirical Fisher as it does second derivatives",
        "evidence/marginal.py",
        "self._noise(sigma) ** self.noise_power",
        "self._noise(sigma) ** 2",
        (
            "evidence/test_linear_gaussian.py",
            "evidence/test_limits.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_face.py",
            "laplace/test_tuning.py",
            "laplace/test_files.py",
            "training/test_marglik.py",
        ),
    ),
    # mackay(evidence, Prior(..., mean=m)), optimize_prior_precision(method="mackay") with a prior_mean other than 0
    Mutant(
        "MacKay's update measures the weights from zero, wherever the prior has its mean",
        "evidence/tuners.py",
        "prior.sums((here.mean - prior.mean).square())",
        "prior.sums(here.mean.square())",
        (
            "evidence/test_linear_gaussian.py",
            "evidence/test_limits.py",
            "laplace/test_tuning.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_face.py",
        ),
    ),
    # -- priors, params, metrics, alignment, curvature, validation (5) ------------------------------------------------
    # ParamSpace.select(module="1") of a network that also has a module "10" (or "fc" beside "fc2")
    Mutant(
        "a module is selected with all others whose names begin like its own",
        "params.py",
        'prefix = f"{module}." if module else ""',
        'prefix = module or ""',
        (
            "test_params.py",
            "test_subnetwork.py",
            "laplace/test_heads.py",
            "laplace/test_face.py",
            "estimate/test_estimators.py",
        ),
    ),
    # auroc(torch.tensor([0, 1]), torch.tensor([0.5])), or float32 scores against float64 ones that round to a tie
    Mutant(
        "scores of two types are compared in the type of the first",
        "metrics.py",
        "inside = scores_in.to(torch.promote_types(scores_in.dtype, scores_out.dtype)).sort().values",
        "inside = scores_in.sort().values",
        ("test_metrics.py", "reporting/test_report.py", "test_figures.py", "test_claims.py"),
    ),
    # alignment(..., gradient=1e-6 * g): conjugate gradients stop at once, the cosines are those of zero (NaN) and
    # nothing has converged, although the length of the gradient is said to play no role
    Mutant(
        "conjugate gradients stop at an absolute residual",
        "directions.py",
        "used = descend(product, x, residual, precondition, tolerance * length, used, iterations)",
        "used = descend(product, x, residual, precondition, tolerance, used, iterations)",
        ("test_directions.py", "test_claims.py", "test_figures.py", "test_bad_input.py"),
    ),
    # Laplace(..., backend=AsdlEF): the GGN instead of the empirical Fisher
    Mutant(
        "one name of the empirical Fisher selects the generalised Gauss-Newton",
        "curvature.py",
        "class AsdlEF(EFInterface): ...",
        "class AsdlEF(GGNInterface): ...",
        (
            "laplace/test_known_names.py",
            "laplace/test_face.py",
            "compat/test_scripts.py",
            "compat/test_signatures.py",
            "test_imports.py",
        ),
    ),
    # validation.grid(..., score=an object with reset, update and compute): every candidate after the first is scored
    # together with those before it
    Mutant(
        "a metric that gathers batches is reset once, not before every candidate",
        "evidence/grid.py",
        "    for k in range(count):\n        metric.reset()\n",
        "    metric.reset()\n    for k in range(count):\n",
        ("evidence/test_grid.py", "laplace/test_tuning.py", "laplace/test_face.py", "predictive/test_predictions.py"),
    ),
)

SECOND_ABOVE = (
    # -- tangent -------------------------------------------------------------------------------------------------------
    # Laplace(..., "all", "propagated_diag") and "mixed_diag" of a network with GroupNorm whose weights are not all one:
    # H and posterior_variance of the layers before it
    Mutant(
        "the weight of a group norm is not squared on the way back of variances",
        "tape/rules/norms.py",
        "m * weight.square().reshape(view)",
        "m * weight.reshape(view)",
        (
            "tape/test_rules.py",
            "tape/test_tape.py",
            "estimate/test_propagated.py",
            "estimate/test_mixed.py",
            "estimate/test_kfra.py",
            "laplace/test_propagated_diag.py",
            "networks/test_networks.py",
        ),
    ),
    # estimate.mixed_diagonal, Laplace(..., "mixed_diag", columns=...) of a network with a skip connection around a
    # narrow layer, and more outputs than columns: the diagonal before that layer
    Mutant(
        "a narrow layer beside a skip connection is taken for a bottleneck that all data pass through",
        "tape/cuts.py",
        "if len(live) == len(made) == 1:",
        "if len(made) == 1:",
        (
            "estimate/test_mixed.py",
            "tape/test_tape.py",
            "tape/test_rules.py",
            "estimate/test_propagated.py",
            "laplace/test_propagated_diag.py",
        ),
    ),
    # Laplace(..., enable_backprop=True): gradients of a predictive variance in the inputs (and .grad of parameters)
    Mutant(
        "the input side of factored rows does not pass the gate to the inputs",
        "linalg/rows.py",
        "for name in (self._by_row, *self._by_point)}",
        "for name in (self._by_row,)}",
        (
            "tangent/test_differentiable.py",
            "tangent/test_features.py",
            "tangent/test_adversarial.py",
            "laplace/test_face.py",
            "laplace/test_adversarial.py",
            "laplace/test_surroundings.py",
        ),
    ),
    # Tangent(model).at(x).value, la.fit and la(x), of a model that calls F.scaled_dot_product_attention with a boolean
    # attn_mask: other outputs than model(x)
    Mutant(
        "attention with a boolean mask looks at what is masked, and at nothing else",
        "tangent/operations.py",
        'masked_fill(~attn_mask, float("-inf"))',
        'masked_fill(attn_mask, float("-inf"))',
        (
            "tangent/test_attention.py",
            "tangent/test_recorder.py",
            "tape/test_tape.py",
            "tangent/test_adversarial.py",
            "tape/test_rules.py",
            "test_layers.py",
            "networks/test_networks.py",
            "laplace/test_surroundings.py",
        ),
    ),
    # Tangent(model).at(x).mv(v) of a model with several outputs and an operation that is differentiable only once
    Mutant(
        "J v from rows, of a model that cannot be differentiated twice, has outputs and data points exchanged",
        "tangent/model.py",
        "return torch.cat(parts).mT.reshape(self.output.shape)",
        "return torch.cat(parts).reshape(self.output.shape)",
        (
            "tangent/test_recorder.py",
            "tangent/test_adversarial.py",
            "tangent/test_paths.py",
            "tangent/test_carried_over.py",
            "tangent/test_routing.py",
            "tangent/test_differentiable.py",
            "test_layers.py",
        ),
    ),
    # la.fit or la(x) of a model whose forward pass adds to a buffer (a counter, running statistics): the user's buffer
    Mutant(
        "buffers of the private copy are the user's own",
        "tangent/private.py",
        "self._kept(tensor, tensor.detach().clone())",
        "self._kept(tensor, tensor.detach())",
        (
            "tangent/test_private.py",
            "tangent/test_adversarial.py",
            "tangent/test_recorder.py",
            "laplace/test_surroundings.py",
            "laplace/test_adversarial.py",
            "laplace/test_identity.py",
            "test_threads.py",
        ),
    ),
    # la.fit(loader of mappings), la({...}) with a model `forward(self, input_ids, **kwargs)`: the mapping is given as
    # one positional argument
    Mutant(
        "a mapping is not spread over the arguments of a forward that takes any by name",
        "tangent/inputs.py",
        "spread = all(key in names for key in x) or any(p.kind == kinds.VAR_KEYWORD for p in parameters)",
        "spread = all(key in names for key in x)",
        (
            "tangent/test_inputs.py",
            "tangent/test_recorder.py",
            "tangent/test_adversarial.py",
            "laplace/test_loaders.py",
            "laplace/test_face.py",
            "laplace/test_rewards.py",
            "laplace/test_adversarial.py",
            "test_bad_input.py",
            "networks/test_networks.py",
        ),
    ),
    # Tangent(model).at(x).rows(), la.fit, of a model that sorts its rows by the data, where one batch came sorted and
    # the next of the same shape does not: the rows are given to the wrong data points
    Mutant(
        "a probe is kept for later batches although the data decide the order of rows",
        "tangent/probe.py",
        "routed = choice or base.routed",
        "routed = choice",
        (
            "tangent/test_routing.py",
            "tangent/test_carried_over.py",
            "tangent/test_adversarial.py",
            "tangent/test_recorder.py",
            "tangent/test_recurrent.py",
        ),
    ),
    # -- laplace -------------------------------------------------------------------------------------------------------
    # la.log_marginal_likelihood(), and the noise that optimize_prior_precision finds, of a regression with several
    # outputs
    Mutant(
        "the evidence counts data points of a regression, not targets",
        "evidence/seen.py",
        "self.targets += value.numel()",
        "self.targets += len(value)",
        (
            "laplace/test_linear_gaussian.py",
            "laplace/test_face.py",
            "laplace/test_tuning.py",
            "laplace/test_loaders.py",
            "laplace/test_checkpoint.py",
            "laplace/test_independent_outputs.py",
            "evidence/test_linear_gaussian.py",
            "training/test_marglik.py",
        ),
    ),
    # la(x, link_approx="mc") with up to 64 classes: probabilities, unless the covariance is diagonal
    Mutant(
        "eigenvectors of the outputs' covariance are scaled by rows, not by columns, before draws are made",
        "laplace/predictions.py",
        "root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)",
        "root = vectors * values.clamp_min(0).sqrt().unsqueeze(-1)",
        (
            "laplace/test_face.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_heads.py",
            "laplace/test_tuning.py",
            "predictive/test_predictions.py",
            "distributions/test_gaussian_logits.py",
            "reporting/test_report.py",
            "test_random_numbers.py",
        ),
    ),
    # marglik_training(..., n_epochs_burnin=...): how many hyper-steps there are, and from which epoch on
    Mutant(
        "the epoch that ends the burn-in is not evaluated",
        "laplace/marglik.py",
        "burn_in=max(0, n_epochs_burnin - 1),",
        "burn_in=n_epochs_burnin,",
        (
            "laplace/test_training.py",
            "training/test_marglik.py",
            "compat/test_scripts.py",
            "compat/test_signatures.py",
            "laplace/test_known_names.py",
        ),
    ),
    # Laplace(..., estimator="mc", backend_kwargs={"mc_samples": 10}): the curvature is that of one draw, still unbiased
    Mutant(
        "the number of draws of the sampled Fisher is ignored",
        "estimate/naming.py",
        "return monte_carlo(draws)",
        "return monte_carlo(1)",
        (
            "laplace/test_face.py",
            "laplace/test_known_names.py",
            "laplace/test_files.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_surroundings.py",
            "compat/test_scripts.py",
            "test_random_numbers.py",
        ),
    ),
    # la.log_prob(value, normalized=False)
    Mutant(
        "the log density without its constant is the whole square, not half of it",
        "laplace/base.py",
        "-self.square_norm(value) / 2",
        "-self.square_norm(value)",
        (
            "laplace/test_face.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_known_names.py",
            "compat/test_signatures.py",
            "compat/test_scripts.py",
            "test_subnetwork.py",
        ),
    ),
    # Laplace(model, "regression", sigma_noise=0.5, backend=...EF) or estimator="empirical": posterior_precision,
    # predictive variances and log_marginal_likelihood where sigma is not one
    Mutant(
        "the empirical Fisher is divided by the square of the noise, not by its fourth power",
        "laplace/base.py",
        'return 4 if self.recipe.source == "empirical" else 2',
        "return 2",
        (
            "laplace/test_face.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_tuning.py",
            "laplace/test_known_names.py",
            "laplace/test_training.py",
            "evidence/test_linear_gaussian.py",
            "evidence/test_limits.py",
            "compat/test_scripts.py",
        ),
    ),
    # lapwing.load(path, model) of a file saved with weights=False, where one tensor of the model has other numbers
    Mutant(
        "a model in which a single tensor has other numbers is accepted for a file without weights",
        "laplace/loading.py",
        'if sha256(state[name]) != entry["sha256"]]\n    if other:',
        'if sha256(state[name]) != entry["sha256"]]\n    if len(other) > 1:',
        (
            "laplace/test_files.py",
            "laplace/test_identity.py",
            "laplace/test_adversarial.py",
            "test_versions.py",
            "defects/test_what_is_kept.py",
        ),
    ),
    # -- applications --------------------------------------------------------------------------------------------------
    # report(la, loader, path)["evidence"]["log_evidence"] of a small full posterior, at every factor but one
    Mutant(
        "the curve of the evidence in a report leaves the penalty on the weights as it is at every precision",
        "reporting/statistics.py",
        "(ratios + factors * scatter) / 2",
        "(ratios + scatter) / 2",
        (
            "reporting/test_report.py",
            "reporting/test_report_noise.py",
            "reporting/test_report_counts.py",
            "cli/test_cli.py",
            "cli/test_demo.py",
        ),
    ),
    # report(...) of counts: coverage of intervals in "summary" and "coverage"
    Mutant(
        "the count at the lower end of an interval is left out of it",
        "reporting/predictions.py",
        "(upper >= (1 - level) / 2)",
        "(lower >= (1 - level) / 2)",
        (
            "reporting/test_report_counts.py",
            "reporting/test_report.py",
            "reporting/test_report_noise.py",
            "distributions/test_poisson_lognormal.py",
        ),
    ),
    # report(...) with a loader of several batches: "rows", and the numbers of the rows in "uncertain"
    Mutant(
        "rows of a report are counted from zero in every batch",
        "reporting/observations.py",
        "row.append(at + rows)",
        "row.append(at)",
        (
            "reporting/test_report.py",
            "reporting/test_report_counts.py",
            "reporting/test_report_noise.py",
            "cli/test_demo.py",
            "cli/test_cli.py",
        ),
    ),
    # fit_table(...) of amounts: bundle.conformal, conformal_lower_90 and upper_90 of bundle.predict, and the summary
    Mutant(
        "conformal scores of amounts are exchanged between the network alone and the posterior",
        "tables/fit.py",
        "both = bundle.amounts_map(raw), bundle.amounts(raw)",
        "both = bundle.amounts(raw), bundle.amounts_map(raw)",
        (
            "tables/test_fitting.py",
            "tables/test_bundle.py",
            "tables/test_conformal.py",
            "cli/test_cli.py",
            "tables/test_noise.py",
            "tables/test_bad_tables.py",
            "reporting/test_report.py",
        ),
    ),
    # network.train(...), LaplaceRegressor().fit(X, y).sigma_, bundle.noise: too small where weights are many for the
    # rows
    Mutant(
        "the noise is estimated as if the parameters of one layer, on average, were determined and not those of all",
        "evidence/tuners.py",
        "left = fit.targets - float(temperature) * evidence.noise_power / 2 * gamma.sum()",
        "left = fit.targets - float(temperature) * evidence.noise_power / 2 * gamma.mean()",
        (
            "tables/test_network.py",
            "tables/test_estimators.py",
            "tables/test_fitting.py",
            "tables/test_noise.py",
            "laplace/test_calibration.py",
            "tables/test_bundle.py",
        ),
    ),
    # network.train(..., "classification", ...)[1].n_data, LaplaceClassifier: the posterior lacks the tenth of the rows
    # that was kept apart
    Mutant(
        "rows that were kept apart to calibrate with never come into the posterior",
        "tables/training.py",
        "if len(rows[0]) > len(run.x):",
        "if len(rows[0]) < len(run.x):",
        (
            "tables/test_shift.py",
            "tables/test_network.py",
            "tables/test_estimators.py",
            "tables/test_fitting.py",
            "laplace/test_calibration.py",
            "tables/test_bundle.py",
            "cli/test_cli.py",
        ),
    ),
    # -- serialize -----------------------------------------------------------------------------------------------------
    # unpack(*pack(curvature * 2)) of a Dual, the curvature of hessian_structure="gp": its numbers
    Mutant(
        "a scaled dual curvature is stored with its rows multiplied by the scale, not by its root",
        "serialize/packing.py",
        "root = value.scale.detach().sqrt().expand(value.rows.count)",
        "root = value.scale.detach().expand(value.rows.count)",
        (
            "serialize/test_packing.py",
            "serialize/test_files.py",
            "linalg/test_dual.py",
            "laplace/test_files.py",
            "laplace/test_checkpoint.py",
            "laplace/test_independent_outputs.py",
        ),
    ),
    # la.save(path), serialize.write(path, ...) where path is a symbolic link: the file that it points to stays old
    Mutant(
        "a link is replaced by the new file instead of followed",
        "serialize/files.py",
        "target = path.resolve()",
        "target = path.absolute()",
        (
            "serialize/test_files.py",
            "laplace/test_files.py",
            "laplace/test_checkpoint.py",
            "tables/test_bundle.py",
            "cli/test_cli.py",
        ),
    ),
    # -- training ------------------------------------------------------------------------------------------------------
    # training.train(model with BatchNorm, ...), marglik_training: running statistics of the last epoch beside weights
    # of the best one; `Trained.state` without buffers
    Mutant(
        "buffers of the best epoch are not kept",
        "training/train_mode.py",
        "return {**dict(model.named_parameters()), **dict(model.named_buffers())}",
        "return dict(model.named_parameters())",
        (
            "training/test_marglik.py",
            "laplace/test_training.py",
            "laplace/test_surroundings.py",
            "compat/test_scripts.py",
        ),
    ),
    # training.train(..., Gaussian(), sigma=0.1, optimizer_cls=SGD): how far a step goes depends on the noise
    Mutant(
        "steps of a regression are scaled by the noise, not by its square",
        "training/objective.py",
        "self.temperature * sigma**2",
        "self.temperature * sigma",
        (
            "training/test_marglik.py",
            "laplace/test_training.py",
            "laplace/test_tuning.py",
            "compat/test_scripts.py",
        ),
    ),
    # -- subnetwork ----------------------------------------------------------------------------------------------------
    # swag_variance(..., every=2), LargestVarianceSWAGSubnetMask(..., swag_snapshot_freq=2): which weights are chosen
    Mutant(
        "the running mean of snapshots is divided by the epochs, not by the snapshots so far",
        "subnetwork/swag.py",
        "mean = mean + away / (epoch // every)",
        "mean = mean + away / epoch",
        (
            "test_subnetwork.py",
            "laplace/test_known_names.py",
            "laplace/test_face.py",
            "compat/test_scripts.py",
            "test_random_numbers.py",
        ),
    ),
    # by_modules(space, ["fc"]), ModuleNameSubnetMask(model, ["1"]): the tensors of "fc2" or of "10" are chosen as well
    Mutant(
        "modules whose names begin as the one that was asked for are chosen too",
        "subnetwork/choices.py",
        'own.startswith(f"{name}.")',
        "own.startswith(name)",
        (
            "test_subnetwork.py",
            "test_params.py",
            "laplace/test_heads.py",
            "laplace/test_known_names.py",
            "compat/test_scripts.py",
        ),
    ),
)


THIRD = (
    # -- linalg (7) ---------------------------------------------------------------------------------------------------
    # la.effective_parameters(), mackay, of FunctionalLaplace with a prior precision other than 1
    Mutant(
        "the trace of a dual inverse has D^-1 once, not on both sides, in what the data have said",
        "linalg/dual.py",
        "seen = [weight.square() * (inverse * gram).sum()",
        "seen = [weight * (inverse * gram).sum()",
        (
            "linalg/test_dual.py",
            "linalg/test_precision.py",
            "estimate/test_dual.py",
            "evidence/test_linear_gaussian.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_independent_outputs.py",
            "laplace/test_tuning.py",
        ),
    ),
    # la.functional_samples(x) of FunctionalLaplace(independent_outputs=True): the spread of every output but the first
    Mutant(
        "functions of all independent outputs are drawn from the posterior of the first",
        "linalg/independent_outputs.py",
        "deltas = precision.draw(n, generator)",
        "deltas = self.outputs[0].draw(n, generator)",
        (
            "laplace/test_independent_outputs.py",
            "linalg/test_dual.py",
            "estimate/test_dual.py",
            "predictive/test_predictions.py",
            "laplace/test_linear_gaussian.py",
        ),
    ),
    # kflr(...) of a tied table with padding (lookup and product with different counts), Kronecker(terms with other
    # counts).dense(): a product that is not the nearest; with equal counts nothing changes
    Mutant(
        "the product nearest to a sum is found with the counts on one side of the inner products only",
        "linalg/kronecker/factors.py",
        "weighted = share.mT[:, :, None] * col_gram * share.mT[:, None, :]  # D C D",
        "weighted = share.mT[:, :, None] * col_gram  # D C",
        (
            "linalg/test_kronecker.py",
            "linalg/test_curvature.py",
            "linalg/test_precision.py",
            "estimate/test_kronecker.py",
            "estimate/test_kfra.py",
            "estimate/test_ekfac.py",
            "test_layers.py",
        ),
    ),
    # (LowRank + LowRank).dense(): eigenvalues enter squared
    Mutant(
        "low-rank curvatures are added with eigenvalues for the lengths of their columns",
        "linalg/low_rank.py",
        "torch.cat([each.vectors * each.values.sqrt() for each in (self, other)], dim=1)",
        "torch.cat([each.vectors * each.values for each in (self, other)], dim=1)",
        (
            "linalg/test_dual.py",
            "linalg/test_curvature.py",
            "linalg/test_precision.py",
            "estimate/test_dual.py",
            "laplace/test_structures.py",
        ),
    ),
    # EkfacLaplace(bias="separate") with one prior precision per tensor: no columns are left at all, and logdet fails
    Mutant(
        "priors that differ take the bases of weight and bias apart also where there are none",
        "linalg/kronecker/corrected.py",
        "columns = self.columns if equal or not self.apart else self.apart",
        "columns = self.columns if equal else self.apart",
        (
            "linalg/test_kronecker.py",
            "linalg/test_curvature.py",
            "linalg/test_precision.py",
            "estimate/test_ekfac.py",
            "laplace/test_face.py",
            "laplace/test_structures.py",
            "laplace/test_options.py",
        ),
    ),
    # KronLaplace.fit(loader, checkpoint=path) of several segments: a sum of products instead of the curvature that a
    # fit without a checkpoint finds
    Mutant(
        "parts of one data set are added block by block as if they were several tasks",
        "linalg/blocks.py",
        "return self.joined(other, lambda a, b: a.pooled(b))",
        "return self.joined(other, lambda a, b: a + b)",
        (
            "laplace/test_checkpoint.py",
            "linalg/test_kronecker.py",
            "linalg/test_curvature.py",
            "estimate/test_kronecker.py",
            "laplace/test_loaders.py",
            "defects/test_what_is_right.py",
        ),
    ),
    # (Dense(H) * 2 * 3).with_prior(1.0).logdet(), evidence.scaled(2) with sigma other than 1
    Mutant(
        "a dense curvature that is scaled twice is decomposed with the last scale alone",
        "linalg/dense.py",
        "return Dense(self.matrix * scale, Multiple(root.of, root.scale * scale))",
        "return Dense(self.matrix * scale, Multiple(root.of, scale))",
        (
            "linalg/test_curvature.py",
            "linalg/test_precision.py",
            "linalg/test_singular.py",
            "evidence/test_linear_gaussian.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_tuning.py",
            "tables/test_network.py",
        ),
    ),
    # -- estimate (7) -------------------------------------------------------------------------------------------------
    # kflr(...) of nn.Embedding(padding_idx=0): curvature of the row of the padding, and the count of all others
    Mutant(
        "padding counts as a token in the input factor of a table",
        "estimate/accumulators.py",
        "                tokens = tokens if piece.padding is None else tokens[tokens != piece.padding]\n",
        "",
        (
            "estimate/test_kronecker.py",
            "estimate/test_kfra.py",
            "estimate/test_ekfac.py",
            "estimate/test_exact_blocks.py",
            "test_layers.py",
            "networks/test_networks.py",
        ),
    ),
    # kflr(...) of a network that uses one weight with its bias and once without (F.linear(x, w))
    Mutant(
        "a use of a weight without its bias counts as one with it",
        "estimate/accumulators.py",
        "F.pad(values, (0, width - values.shape[-1]))",
        "F.pad(values, (0, width - values.shape[-1]), value=1.0)",
        (
            "tangent/test_corners.py",
            "estimate/test_kronecker.py",
            "estimate/test_kfra.py",
            "estimate/test_ekfac.py",
            "estimate/test_exact_blocks.py",
            "linalg/test_kronecker.py",
            "test_layers.py",
        ),
    ),
    # Laplace(model, Categorical(ignore_index=-100), "last_layer", "full", estimator="fisher"): H
    Mutant(
        "the closed form of the last layer's Fisher counts positions without a target",
        "estimate/last_layer.py",
        "return hessian if observed is None else hessian.where(observed[..., None, None], 0.0)",
        "return hessian",
        (
            "estimate/test_last_layer.py",
            "estimate/test_cotangents.py",
            "estimate/test_estimators.py",
            "laplace/test_heads.py",
            "laplace/test_face.py",
            "tangent/test_features.py",
        ),
    ),
    # low_rank(..., rank=k) with fewer rows than gram_rows and more than k, LowRankLaplace(rank=k)
    Mutant(
        "the smallest eigenvectors of the Gram matrix are taken for the largest",
        "estimate/leading_eigenpairs.py",
        "dual.rows.pull(vectors.mT.flip(0)[:rank]).mT",
        "dual.rows.pull(vectors.mT[:rank]).mT",
        (
            "estimate/test_dual.py",
            "estimate/test_estimators.py",
            "linalg/test_dual.py",
            "laplace/test_structures.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_face.py",
        ),
    ),
    # kfra(...) of a network with LayerNorm, or a lone bias: its dense block is the mean over the data
    Mutant(
        "the dense block of a vector is a mean over the data in the recursive estimator, not a sum",
        "estimate/propagated/kfra.py",
        "found = Dense(self.count * G) if small else Diagonal(self.count * G.diagonal())",
        "found = Dense(G) if small else Diagonal(self.count * G.diagonal())",
        (
            "estimate/test_kfra.py",
            "laplace/test_recursive.py",
            "estimate/test_kronecker.py",
            "test_layers.py",
            "networks/test_networks.py",
        ),
    ),
    # FunctionalLaplace(model, "classification", independent_outputs=True): variances and evidence
    Mutant(
        "rows of independent outputs are weighed by the diagonal of the Hessian, not by its root",
        "estimate/cotangents.py",
        "root = squares.sqrt().reshape(len(f), -1)",
        "root = squares.reshape(len(f), -1)",
        (
            "estimate/test_cotangents.py",
            "estimate/test_dual.py",
            "laplace/test_independent_outputs.py",
            "linalg/test_dual.py",
            "laplace/test_linear_gaussian.py",
        ),
    ),
    # diagonal(...), DiagLaplace, of a network that uses one weight in two layers, on two batches or more
    Mutant(
        "the diagonal of a weight with several uses is that of the last batch",
        "estimate/exact_diagonal.py",
        "        spread = torch.zeros_like(self.total)\n        segments.scatter(squares, spread)\n"
        "        self.total += spread\n",
        "        segments.scatter(squares, self.total)\n",
        (
            "estimate/test_estimators.py",
            "estimate/test_mixed.py",
            "estimate/test_exact_blocks.py",
            "estimate/test_last_layer.py",
            "linalg/test_memory.py",
            "laplace/test_face.py",
            "test_layers.py",
        ),
    ),
    # -- likelihoods and distributions (6) ----------------------------------------------------------------------------
    # BernoulliMixture().hessian(f, y): entries between the second coin's logit and the others
    Mutant(
        "the two coins of a mixture pull its responsibility in the same direction",
        "likelihoods/bernoulli_mixture.py",
        "d = torch.stack([torch.ones_like(u), z * u, -z * w], dim=-1)",
        "d = torch.stack([torch.ones_like(u), z * u, z * w], dim=-1)",
        (
            "likelihoods/test_likelihood_derivatives.py",
            "likelihoods/test_likelihood_properties.py",
            "likelihoods/test_likelihood_predictions.py",
            "likelihoods/test_likelihood_errors.py",
            "estimate/test_estimators.py",
        ),
    ),
    # HeteroscedasticGaussian().hessian_sqrt(f, y), and with it every curvature of likelihood="heteroscedastic"
    Mutant(
        "the root of the Fisher of a log-variance is one half, as the Fisher itself",
        "likelihoods/heteroscedastic.py",
        "torch.full_like(root, math.sqrt(0.5))",
        "torch.full_like(root, 0.5)",
        (
            "likelihoods/test_likelihood_derivatives.py",
            "likelihoods/test_likelihood_properties.py",
            "likelihoods/test_likelihood_sampling.py",
            "estimate/test_cotangents.py",
            "estimate/test_estimators.py",
            "tables/test_noise.py",
        ),
    ),
    # la.predict_distribution(x).interval(0.9) of likelihood="poisson" at small rates: the lower end is 1
    Mutant(
        "no quantile of counts is zero",
        "distributions/poisson_lognormal.py",
        "low, high = torch.full_like(self.log_rate, -1), torch.ones_like(self.log_rate)",
        "low, high = torch.zeros_like(self.log_rate), torch.ones_like(self.log_rate)",
        (
            "distributions/test_poisson_lognormal.py",
            "likelihoods/test_likelihood_predictions.py",
            "reporting/test_report_counts.py",
            "predictive/test_predictions.py",
            "laplace/test_face.py",
        ),
    ),
    # bundle.predict(...)["sd_noise"], ScaleMixture.rescaled(3.0, 0.0).noise
    Mutant(
        "noise variances are brought to another unit by its factor, not by the square of it",
        "distributions/scale_mixture.py",
        "self.log_noise + 2 * log(scale)",
        "self.log_noise + log(scale)",
        (
            "distributions/test_scale_mixture.py",
            "tables/test_bundle.py",
            "tables/test_noise.py",
            "tables/test_fitting.py",
            "reporting/test_report_noise.py",
            "reporting/test_report.py",
        ),
    ),
    # la(x, link_approx="bridge"): probabilities, unless rows of the covariance sum to zero
    Mutant(
        "the Laplace bridge conditions the mean on a sum of zero, and not the covariance",
        "distributions/gaussian_logits.py",
        "    covariance = covariance - row.unsqueeze(-1) * row.unsqueeze(-2) / total.unsqueeze(-1)\n",
        "",
        (
            "distributions/test_gaussian_logits.py",
            "predictive/test_predictions.py",
            "likelihoods/test_likelihood_predictions.py",
            "evidence/test_grid.py",
            "laplace/test_face.py",
            "compat/test_scripts.py",
        ),
    ),
    # links.integrated(f).of(mean, variance), a likelihood of one's own with such a link: half the variance
    Mutant(
        "the trapezoidal rule of a link weighs its points by the square of the normal density",
        "likelihoods/links.py",
        "weights = torch.softmax(-points.square() / 2, 0)",
        "weights = torch.softmax(-points.square(), 0)",
        (
            "likelihoods/test_own_link.py",
            "likelihoods/test_likelihood_predictions.py",
            "likelihoods/test_likelihood_properties.py",
            "predictive/test_predictions.py",
            "evidence/test_grid.py",
        ),
    ),
    # -- tangent (6) --------------------------------------------------------------------------------------------------
    # Tangent(model).at(x).value, la.fit and la(x), of nn.LSTM(bidirectional=True) whose outputs at all times are used
    Mutant(
        "outputs of the backward direction of a recurrence come in the order in which they are made",
        "tangent/recurrent.py",
        "torch.stack(found[::-1] if direction else found, time)",
        "torch.stack(found, time)",
        (
            "tangent/test_recurrent.py",
            "tangent/test_recorder.py",
            "tangent/test_adversarial.py",
            "tape/test_tape.py",
            "test_layers.py",
            "networks/test_networks.py",
        ),
    ),
    # Tangent(model).at(x).rows(), la.fit, of nn.Conv2d(..., kernel_size=2 or 4, padding="same")
    Mutant(
        "the odd row of padding='same' is put before the image instead of after it",
        "tangent/convolution.py",
        "sides = [(t // 2, t - t // 2) for t in total]",
        "sides = [(t - t // 2, t // 2) for t in total]",
        (
            "tangent/test_convolution.py",
            "tangent/test_recorder.py",
            "estimate/test_kronecker.py",
            "estimate/test_exact_blocks.py",
            "estimate/test_kfra.py",
            "test_layers.py",
        ),
    ),
    # Tangent(model).at(x).rows(), la.fit, of a model with torch.add(x, self.shift, alpha=2)
    Mutant(
        "a parameter that is added with a factor counts as added without one",
        "tangent/rules.py",
        'if function in _PLAIN_SUM and "alpha" not in named:',
        "if function in _PLAIN_SUM:",
        (
            "tangent/test_corners.py",
            "tangent/test_recorder.py",
            "tangent/test_adversarial.py",
            "tangent/test_paths.py",
            "tangent/test_differentiable.py",
            "estimate/test_exact_blocks.py",
            "test_layers.py",
        ),
    ),
    # Tangent(model).at(tokens).rows(), diagonal(...), of nn.Embedding(padding_idx=0): rows of the padding
    Mutant(
        "padding passes gradients on where its index is zero",
        "tangent/uses.py",
        "if self.padding is not None:",
        "if self.padding:",
        (
            "tangent/test_recorder.py",
            "tangent/test_adversarial.py",
            "linalg/test_rows.py",
            "estimate/test_kronecker.py",
            "estimate/test_estimators.py",
            "estimate/test_exact_blocks.py",
            "test_layers.py",
            "networks/test_networks.py",
        ),
    ),
    # Tangent(model, budget=small).at(x).rows() with more outputs than fit at once: those of the first chunk again
    Mutant(
        "unit cotangents begin with the first output in every chunk",
        "tangent/model.py",
        "eye.diagonal(part.start).fill_(1)",
        "eye.diagonal().fill_(1)",
        (
            "tangent/test_corners.py",
            "tangent/test_recorder.py",
            "tangent/test_differentiable.py",
            "tangent/test_adversarial.py",
            "linalg/test_memory.py",
            "estimate/test_estimators.py",
            "laplace/test_surroundings.py",
            "test_layers.py",
        ),
    ),
    # Tangent(model).at(x).rows() of torch.einsum("...i,...io->...o", x, w) with w [t, i, o] for x [b, t, i]
    Mutant(
        "axes behind the dots of an einsum are matched from the left",
        "tangent/rules.py",
        'f"...{shared - extra + j}" for j in range(extra)',
        'f"...{j}" for j in range(extra)',
        (
            "tangent/test_corners.py",
            "tangent/test_recorder.py",
            "tangent/test_adversarial.py",
            "estimate/test_exact_blocks.py",
            "estimate/test_kronecker.py",
            "linalg/test_rows.py",
            "test_layers.py",
        ),
    ),
    # -- tape (2) -----------------------------------------------------------------------------------------------------
    # propagated_diagonal(...), PropagatedDiagLaplace, of layers before a LayerNorm or GroupNorm
    Mutant(
        "the mixed term of mean and deviation is counted once in the squared Jacobian of a normalisation",
        "tape/rules/norms.py",
        "spread = n.sum(-1, keepdim=True) + 2 * z * first + z.square() * second",
        "spread = n.sum(-1, keepdim=True) + z * first + z.square() * second",
        (
            "tape/test_rules.py",
            "tape/test_tape.py",
            "estimate/test_propagated.py",
            "estimate/test_mixed.py",
            "laplace/test_propagated_diag.py",
            "test_layers.py",
        ),
    ),
    # propagated_diagonal(...) of a layer under torch.nn.utils.parametrizations.weight_norm with lengths other than 1
    Mutant(
        "the length of a normalised weight is not squared on the way back of variances to its direction",
        "tape/rules/norms.py",
        "_unit_length(v, m * g.square(), rest, 2.0, 0.0)",
        "_unit_length(v, m * g, rest, 2.0, 0.0)",
        (
            "tape/test_rules.py",
            "tape/test_tape.py",
            "estimate/test_propagated.py",
            "estimate/test_mixed.py",
            "laplace/test_propagated_diag.py",
            "test_layers.py",
        ),
    ),
    # -- predictive and evidence (4) ----------------------------------------------------------------------------------
    # predictive.moments(posterior, linear, sigma=0.5)
    Mutant(
        "the covariance of noisy observations has the deviation of the noise added",
        "predictive/glm.py",
        "noise = torch.as_tensor(sigma, dtype=covariance.dtype, device=covariance.device).square()",
        "noise = torch.as_tensor(sigma, dtype=covariance.dtype, device=covariance.device)",
        (
            "predictive/test_predictions.py",
            "laplace/test_linear_gaussian.py",
            "evidence/test_linear_gaussian.py",
            "evidence/test_grid.py",
            "test_claims.py",
        ),
    ),
    # evidence.grid(..., sigma=0.5), optimize_prior_precision(method="gridsearch") at another sigma or temperature
    Mutant(
        "variances of candidates are swept at the prior times the scale of the curvature, not divided by it",
        "predictive/candidates.py",
        "curvature.variances(linear, self.deltas / self.scales)",
        "curvature.variances(linear, self.deltas * self.scales)",
        (
            "evidence/test_grid.py",
            "predictive/test_predictions.py",
            "laplace/test_tuning.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_face.py",
        ),
    ),
    # la.log_marginal_likelihood() with a temperature other than 1
    Mutant(
        "the temperature does not divide the log-likelihood in the evidence",
        "evidence/marginal.py",
        'return fit / self._positive(temperature, "temperature")',
        "return fit",
        (
            "evidence/test_linear_gaussian.py",
            "evidence/test_limits.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_face.py",
            "laplace/test_tuning.py",
            "training/test_marglik.py",
        ),
    ),
    # evidence.grid(..., score=...) where one candidate has the score NaN or -inf: it is the best
    Mutant(
        "a score that is no finite number wins the search",
        "evidence/grid.py",
        'return int(scores.where(finite, float("inf")).argmin())',
        "return int(scores.argmin())",
        (
            "evidence/test_grid.py",
            "evidence/test_limits.py",
            "laplace/test_tuning.py",
            "laplace/test_face.py",
            "test_bad_input.py",
        ),
    ),
    # -- laplace (7) --------------------------------------------------------------------------------------------------
    # la(x); la.temperature = 0.1; la(x): the same as before
    Mutant(
        "the posterior is kept when the temperature changes",
        "laplace/base.py",
        " and numbers[2] is temperature:",
        ":",
        (
            "laplace/test_options.py",
            "laplace/test_face.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_tuning.py",
            "laplace/test_calibration.py",
            "laplace/test_adversarial.py",
            "test_threads.py",
        ),
    ),
    # DiagLaplace(..., temperature=0.5).posterior_precision
    Mutant(
        "the diagonal precision that users read leaves out the temperature",
        "laplace/variants/all_weights.py",
        "total = self.H / (self.sigma_noise**self.noise_power * self.temperature) + self.prior_precision_diag",
        "total = self.H / self.sigma_noise**self.noise_power + self.prior_precision_diag",
        (
            "laplace/test_options.py",
            "laplace/test_face.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_structures.py",
            "laplace/test_known_names.py",
            "laplace/test_propagated_diag.py",
            "compat/test_scripts.py",
            "test_subnetwork.py",
        ),
    ),
    # la.optimize_prior_precision(method="pseudo_data", val_loader=...): la.temperature
    Mutant(
        "pseudo-data that count for more than the data make the posterior hotter",
        "laplace/tuning.py",
        "return values[found.index[1]].reshape(1), points / found.best[0]",
        "return values[found.index[1]].reshape(1), found.best[0] / points",
        (
            "laplace/test_tuning.py",
            "laplace/test_face.py",
            "laplace/test_linear_gaussian.py",
            "evidence/test_grid.py",
            "laplace/test_options.py",
        ),
    ),
    # lapwing.attach(model, loader, val_loader=...) of a regression whose noise is rescaled: the covariance changes by
    # the noise as well
    Mutant(
        "the temperature does not make up for a noise level that calibration changes",
        "laplace/calibration.py",
        "la.temperature = la.temperature * c / s**la.evidence.noise_power",
        "la.temperature = la.temperature * c",
        (
            "laplace/test_calibration.py",
            "laplace/test_attach.py",
            "tables/test_network.py",
            "tables/test_noise.py",
            "tables/test_estimators.py",
        ),
    ),
    # delta = torch.tensor([1.0]); la.prior_precision = delta; delta.mul_(2): the posterior's prior precision is 2
    Mutant(
        "hyper-parameters share the memory of the tensors they were given as",
        "laplace/hyper.py",
        "return torch.as_tensor(value, dtype=dtype, device=device).clone()",
        "return torch.as_tensor(value, dtype=dtype, device=device)",
        (
            "laplace/test_face.py",
            "laplace/test_adversarial.py",
            "laplace/test_identity.py",
            "laplace/test_options.py",
            "laplace/test_surroundings.py",
            "laplace/test_tuning.py",
        ),
    ),
    # la.fit(other_loader, checkpoint=path) where an earlier batch than the last one is another: accepted
    Mutant(
        "of the batches in a checkpoint only the last one is compared",
        "laplace/checkpoint.py",
        "self.batches + 1, digest((self.data, batch))",
        "self.batches + 1, digest(batch)",
        (
            "laplace/test_checkpoint.py",
            "laplace/test_loaders.py",
            "laplace/test_files.py",
            "defects/test_what_is_kept.py",
            "test_bad_input.py",
        ),
    ),
    # la.functional_samples(x, diagonal_output=True), predictive_samples likewise: their spread
    Mutant(
        "outputs that are drawn each on its own have the variance for a deviation",
        "laplace/base.py",
        "return mean + variance.sqrt() * normal((count, *mean.shape), mean, generator)",
        "return mean + variance * normal((count, *mean.shape), mean, generator)",
        (
            "laplace/test_face.py",
            "laplace/test_linear_gaussian.py",
            "laplace/test_options.py",
            "predictive/test_predictions.py",
            "compat/test_scripts.py",
            "test_random_numbers.py",
        ),
    ),
    # -- tables (4) ---------------------------------------------------------------------------------------------------
    # conformal.quantile(scores, 0.9), bundle.conformal.interval(...): one score too few
    Mutant(
        "a conformal quantile does not count the new row",
        "tables/conformal.py",
        "return ceil((n + 1) * level - 1e-9)",
        "return ceil(n * level - 1e-9)",
        (
            "tables/test_conformal.py",
            "tables/test_bundle.py",
            "tables/test_fitting.py",
            "reporting/test_report.py",
            "reporting/test_report_counts.py",
            "test_claims.py",
        ),
    ),
    # Encoder(frame), fit_table(...) of a column of categories with empty cells: the input "missing" is never on
    Mutant(
        "a missing category is encoded as a rare one although it has an input of its own",
        "tables/encoder.py",
        "codes[missing] = other + self.indicator",
        "codes[missing] = other",
        (
            "tables/test_table.py",
            "tables/test_bad_tables.py",
            "tables/test_fitting.py",
            "tables/test_bundle.py",
            "cli/test_cli.py",
        ),
    ),
    # bundle.predict(table)["ood"] of rows with an unknown or an extreme value that the network is sure of
    Mutant(
        "rows are flagged by what the network does not know, and not by their entries",
        "tables/bundle.py",
        "return (self.familiarity(raw) > self.ood.threshold) | raw.strange",
        "return self.familiarity(raw) > self.ood.threshold",
        (
            "tables/test_bundle.py",
            "tables/test_bad_tables.py",
            "tables/test_fitting.py",
            "tables/test_table.py",
            "cli/test_cli.py",
        ),
    ),
    # network.train(...), LaplaceRegressor().fit(X, y) with more rows than one batch: weights that are no mode of the
    # posterior, but far too small
    Mutant(
        "the prior pulls once per batch of rows, not once per table, where networks of tables are trained",
        "tables/stretch.py",
        "ParamSpace.of(self.model), len(self.x))",
        "ParamSpace.of(self.model), self.size)",
        (
            "tables/test_network.py",
            "tables/test_estimators.py",
            "tables/test_fitting.py",
            "tables/test_noise.py",
            "tables/test_bundle.py",
        ),
    ),
    # -- reporting and cli (2) ----------------------------------------------------------------------------------------
    # report(la, loader, path)["coverage"]["conformal"]["covered"]
    Mutant(
        "conformal intervals of a report are tested on the rows that calibrated them",
        "reporting/statistics.py",
        "_conformal_hits(data, scores, rest, bound)",
        "_conformal_hits(data, scores, calibration, bound)",
        (
            "reporting/test_report.py",
            "reporting/test_report_counts.py",
            "reporting/test_report_noise.py",
            "cli/test_cli.py",
            "tables/test_conformal.py",
        ),
    ),
    # lapwing fit data.csv --target y --out data.csv: the table is written over by the model
    Mutant(
        "a model may be written over the table it is fitted to",
        "cli/commands.py",
        "_check_writable(path, data)",
        "_check_writable(path)",
        ("cli/test_cli.py", "cli/test_demo.py", "test_bad_input.py", "tables/test_bad_tables.py"),
    ),
    # -- serialize (1) ------------------------------------------------------------------------------------------------
    # os.chmod(path, 0o600); la.save(path): others may read it again
    Mutant(
        "a file that is written anew loses its permissions",
        "serialize/files.py",
        "        if target.exists():\n            copymode(target, partial)\n",
        "",
        (
            "serialize/test_files.py",
            "laplace/test_files.py",
            "laplace/test_checkpoint.py",
            "tables/test_bundle.py",
            "defects/test_what_is_kept.py",
        ),
    ),
    # -- training (2) -------------------------------------------------------------------------------------------------
    # training.train(..., epochs=5, every=2).evaluated, marglik_training(marglik_frequency=...): the last epoch
    Mutant(
        "the last epoch is not evaluated unless its turn has come",
        "training/loop.py",
        "if number == epochs or due(number):",
        "if due(number):",
        (
            "training/test_marglik.py",
            "laplace/test_training.py",
            "tables/test_network.py",
            "compat/test_scripts.py",
            "tables/test_noise.py",
        ),
    ),
    # optimize_prior_precision(method="adam", lr=...), training.train(hyper_lr=...): steps of 1e-3 always
    Mutant(
        "the rate of Adam's steps up the evidence is ignored",
        "training/evidence_ascent.py",
        '    state.optimiser.param_groups[0]["lr"] = lr\n',
        "",
        (
            "training/test_marglik.py",
            "laplace/test_training.py",
            "laplace/test_tuning.py",
            "compat/test_scripts.py",
            "laplace/test_options.py",
        ),
    ),
    # -- metrics and subnetwork (2) -----------------------------------------------------------------------------------
    # metrics.coverage(mean, variance, targets, 0.9)
    Mutant(
        "an interval reaches to the quantile of its level on both sides",
        "metrics.py",
        "torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64, device=mean.device))",
        "torch.special.ndtri(torch.tensor(level, dtype=torch.float64, device=mean.device))",
        ("test_metrics.py", "reporting/test_report.py", "test_figures.py", "test_claims.py"),
    ),
    # swag_variance(...), LargestVarianceSWAGSubnetMask: variances are too large, the first snapshot's square among them
    Mutant(
        "squares along SGD are those of the distances from the mean before each snapshot",
        "subnetwork/swag.py",
        "squares = squares + away * (now - mean)",
        "squares = squares + away.square()",
        (
            "test_subnetwork.py",
            "laplace/test_known_names.py",
            "laplace/test_face.py",
            "compat/test_scripts.py",
            "test_random_numbers.py",
        ),
    ),
)


FOURTH = (
    # -- linalg (8) ---------------------------------------------------------------------------------------------------
    Mutant(
        "parameters that the second data set does not reach lose the curvature of the first",
        "linalg/blocks.py",
        "            elif not block.empty:\n",
        "            else:\n",
        ("linalg", "estimate/test_kronecker.py", "laplace/test_face.py"),
    ),  # seen as: Blocks + Blocks, fit(override=False), where the second data leave a branch unused: zero curvature
    # there
    Mutant(
        "of a role that both data sets have, only the first set's sums are kept where their other roles differ",
        "linalg/kronecker/factors.py",
        "found[term.role] = found[term.role] + term if term.role in found else term",
        "found[term.role] = found.get(term.role, term)",
        ("linalg", "estimate/test_kronecker.py", "laplace/test_checkpoint.py"),
    ),  # seen as: Kronecker.pooled of a tied weight, used by one part upright and by the other upright and as a table
    Mutant(
        "precisions that are equal now are tuned as one number for each tensor",
        "linalg/dual.py",
        "            varied.append(groups)\n",
        "",
        ("linalg/test_dual.py", "linalg/test_precision.py", "laplace/test_tuning.py", "evidence"),
    ),  # seen as: the gradient of log Z in a diagonal prior that starts constant (gp, lowrank) is on first entries
    # alone
    Mutant(
        "weights of rows are dealt out to independent outputs as if rows came output by output",
        "linalg/independent_outputs.py",
        "roots.unflatten(0, (-1, self.count)).unbind(1)",
        "roots.unflatten(0, (self.count, -1)).unbind(0)",
        ("linalg/test_dual.py", "linalg/test_precision.py", "laplace/test_independent_outputs.py"),
    ),  # seen as: (a * 2 + b).with_prior(1).logdet() of two Independent curvatures: points have each other's weights
    Mutant(
        "tokens outside of a cut of the table are put at its edges",
        "linalg/rows.py",
        "left = (self.left[..., i] * inside.unsqueeze(-1)).double()",
        "left = self.left[..., i].double()",
        ("linalg/test_rows.py", "linalg/test_dual.py", "linalg/test_memory.py", "estimate/test_dual.py"),
    ),  # seen as: dual(...).variance() or a prior per entry, for a table so large (or a budget so small) that it is cut
    Mutant(
        "draws under a prior that differs between parameters have the covariance of the transposed factor",
        "linalg/dense.py",
        "return torch.linalg.solve_triangular(self.factor.mT, noise.mT, upper=True).mT",
        "return torch.linalg.solve_triangular(self.factor, noise.mT, upper=False).mT",
        ("linalg/test_precision.py", "linalg/test_curvature.py", "laplace/test_linear_gaussian.py"),
    ),  # seen as: Dense(H).with_prior(vector).draw(n), FullLaplace.sample with a layerwise prior: L^-1 L^-T, not L^-T
    # L^-1
    Mutant(
        "a precision of zero is not looked at where another of the candidates is above zero",
        "linalg/checks.py",
        "if bool((delta != 0).all()):",
        "if bool((delta != 0).any()):",
        ("linalg",),
    ),  # seen as: sweep(pieces, [0.0, 1.0]) of a singular curvature whose zero rounds to 1e-9: variances of 1e9, no
    # error
    Mutant(
        "the distance of a merged sum counts what it keeps in both of its bases",
        "linalg/kronecker/structure.py",
        "for each in found.columns)",
        "for each in found.columns + found.apart)",
        ("linalg/test_kronecker.py", "linalg/test_curvature.py", "estimate/test_ekfac.py"),
    ),  # seen as: KroneckerSum.merge_error is 0 for two tasks of a layer with a joint bias and more than 2048 weights
    # -- likelihoods and distributions (6) ----------------------------------------------------------------------------
    Mutant(
        "the variance of a lognormal rate is that of its logarithm times the square of its mean",
        "distributions/poisson_lognormal.py",
        "torch.expm1(self.variance) * expected.square()",
        "self.variance * expected.square()",
        ("distributions/test_poisson_lognormal.py", "likelihoods", "predictive"),
    ),  # seen as: deviation and parts of predicted counts with a log-rate variance of 1 or so: 1 in place of e - 1
    Mutant(
        "the distribution function of counts integrates over the log-rate however sharp the step is",
        "distributions/poisson_lognormal.py",
        "narrow = s * a.sqrt() < 1",
        "narrow = s < 1",
        ("distributions/test_poisson_lognormal.py", "reporting/test_report_counts.py"),
    ),  # seen as: cdf and interval of counts in the thousands with a log-rate deviation of 0.5: off by 0.01
    Mutant(
        "what a network says without error bars keeps the spread of its noise",
        "distributions/scale_mixture.py",
        "return replace(self, variance=torch.zeros_like(self.mean), spread=torch.zeros_like(self.mean))",
        "return replace(self, variance=torch.zeros_like(self.mean))",
        ("distributions/test_scale_mixture.py", "tables/test_noise.py", "reporting/test_report_noise.py"),
    ),  # seen as: the MAP rows of a table or report with learned noise: other nll, coverage and deviation
    Mutant(
        "probabilities are looked for along the last axis, wherever the classes are",
        "likelihoods/categorical.py",
        "bool((self.to_last(f).sum(-1) - 1).abs().max() < 1e-3)",
        "bool((f.sum(-1) - 1).abs().max() < 1e-3)",
        ("likelihoods", "test_bad_input.py", "laplace/test_adversarial.py"),
    ),  # seen as: a segmentation network [B, C, H, W] that ends in a softmax over axis 1 is fitted without a word
    Mutant(
        "a probability that rounds to one has an infinite logit",
        "likelihoods/bernoulli.py",
        "return torch.logit(p.clamp(limits.tiny, 1 - limits.eps))",
        "return torch.logit(p.clamp_min(limits.tiny))",
        ("likelihoods", "evidence/test_grid.py", "laplace/test_tuning.py"),
    ),  # seen as: gridsearch with link_approx="quadrature" and a logit of 20: the score is NaN at every candidate
    Mutant(
        "Gauss-Hermite is used for logits up to a deviation of two, as if that were one",
        "distributions/gaussian_logits.py",
        "return torch.where(variance < 1, narrow, wide)",
        "return torch.where(variance < 4, narrow, wide)",
        ("distributions/test_gaussian_logits.py", "predictive", "likelihoods/test_likelihood_predictions.py"),
    ),  # seen as: quadrature(mean, variance) for variances from 1 to 4 is that of variance 1
    # -- tangent (6) --------------------------------------------------------------------------------------------------
    Mutant(
        "padding that is counted from the end of a table is not recognised",
        "tangent/rules.py",
        "    if padding is not None and padding < 0:\n        padding += len(table)\n",
        "",
        ("tangent/test_recorder.py", "tangent/test_corners.py", "estimate/test_estimators.py", "test_layers.py"),
    ),  # seen as: a forward with F.embedding(x, w, padding_idx=-1): the padding row has rows and curvature
    Mutant(
        "a custom function in a later batch is trusted with its second derivative after the first batch",
        "tangent/model.py",
        "        if custom_function(linearisation.output):\n            return linearisation.adjoint\n",
        "",
        ("tangent",),
    ),  # seen as: Linearisation.mv of a batch that reaches a custom autograd function with a detached backward: wrong
    # J v
    Mutant(
        "a part of a parameter that is not dense in memory is taken for one that is",
        "tangent/sources.py",
        "        if out.shape[axis] > 1 and out.stride(axis) != expected:\n            return None\n",
        "",
        ("tangent/test_recorder.py", "tangent/test_corners.py", "estimate/test_exact_blocks.py", "test_layers.py"),
    ),  # seen as: F.linear(x, w[:, :3]): rows and curvature lie at the wrong entries of w
    Mutant(
        "outputs of a few samples are compared with themselves, not with those of the batch",
        "tangent/features.py",
        "if differ(again.output, found.output[: again.batch]):",
        "if differ(again.output, again.output):",
        ("tangent/test_features.py", "laplace/test_heads.py", "laplace/test_adversarial.py"),
    ),  # seen as: a last-layer posterior of a network that subtracts the mean over the batch is accepted
    Mutant(
        "numbers whose sum overflows are taken for infinite",
        "tangent/inputs.py",
        "return isfinite(tensor.detach().sum().item()) or bool(torch.isfinite(tensor).all())",
        "return isfinite(tensor.detach().sum().item())",
        ("tangent/test_inputs.py", "test_bad_input.py", "laplace/test_surroundings.py"),
    ),  # seen as: float16 inputs with a sum above 65504 are refused as NaN or infinite, with an IndexError on the way
    Mutant(
        "what the scale of a channel normalisation is multiplied with has the shift added to it",
        "tangent/rules.py",
        'plain, function = bound | {"weight": None, "bias": None}, call.function',
        'plain, function = bound | {"weight": None}, call.function',
        ("tangent/test_corners.py",),
    ),  # seen as: rows of the weight of BatchNorm2d, GroupNorm with a trained bias (not 0): factor z + bias, not z
    # -- tape (4) -----------------------------------------------------------------------------------------------------
    Mutant(
        "factors of a sum of products are not squared with its arguments",
        "tape/rules/products.py",
        'scales = {key: node.kwargs[key] ** 2 for key in ("alpha", "beta") if key in node.kwargs}',
        'scales = {key: node.kwargs[key] for key in ("alpha", "beta") if key in node.kwargs}',
        ("tape", "estimate/test_propagated.py"),
    ),  # seen as: propagated_diagonal through torch.addmm(b, x, w, alpha=0.5): twice too large
    Mutant(
        "an einsum without an arrow has its result's axes in the order of their occurrence",
        "tape/rules/products.py",
        '"".join(sorted(label for label in set(seen) - set(shared) if seen.count(label) == 1))',
        '"".join(label for label in seen if label not in shared and seen.count(label) == 1)',
        ("tape", "estimate/test_propagated.py"),
    ),  # seen as: propagated_diagonal through torch.einsum("bj,ja", x, w), whose result is [a, b]: variances transposed
    Mutant(
        "a tensor that was written to through a view is propagated as it was before",
        "tape/tape.py",
        "if version_of(tensor) != version:",
        "if version_of(tensor) < version:",
        ("tape", "estimate/test_propagated.py", "estimate/test_kfra.py"),
    ),  # seen as: h[:, :2].mul_(3), then a layer on h: variances without the factor of 9, where it was refused
    Mutant(
        "the scale of a batch norm takes its variance from inputs that are not centred",
        "tape/rules/norms.py",
        'plain = (x - bound["running_mean"].reshape(view)) * scale.reshape(view)',
        "plain = x * scale.reshape(view)",
        ("tape", "estimate/test_propagated.py"),
    ),  # seen as: propagated_diagonal at the weight of a BatchNorm whose running_mean is not zero
    # -- estimate (8) -------------------------------------------------------------------------------------------------
    Mutant(
        "the closed form of the last layer takes the Hessian as it is, and not its positive substitute",
        "estimate/last_layer.py",
        "return self.likelihood.psd_hessian(f, y)",
        "return self.likelihood.hessian(f, y)",
        ("estimate/test_last_layer.py", "laplace/test_heads.py", "tables/test_noise.py"),
    ),  # seen as: last_layer.full, kron, diagonal with HeteroscedasticGaussian or BernoulliMixture: indefinite
    Mutant(
        "tensors without samples are those of the first batch in a subset of several",
        "estimate/dual_rows.py",
        "x.shape[1:] == y.shape[1:] if has_samples else torch.equal(x, y)",
        "x.shape[1:] == y.shape[1:] if has_samples else x.shape == y.shape",
        ("estimate/test_dual.py", "laplace/test_loaders.py"),
    ),  # seen as: subset(...) of pairs ((x, mask), y) with another mask [T, T] in every batch: one mask for all
    Mutant(
        "a vector of exactly dense_limit entries gets a diagonal",
        "estimate/kronecker.py",
        "found = exact_block(segments, segments.size <= options.dense_limit, tangent)",
        "found = exact_block(segments, segments.size < options.dense_limit, tangent)",
        ("estimate/test_kronecker.py", "estimate/test_ekfac.py", "laplace/test_options.py"),
    ),  # seen as: kflr(dense_limit=8) of a LayerNorm(8), or LayerNorm(1024) by default: covariances are dropped
    Mutant(
        "weights that are made of parameters before the bottleneck lose their variances",
        "estimate/propagated/mixed.py",
        "        held = walk(cut.before, held)  # what is left are functions of parameters alone\n",
        "",
        ("estimate/test_mixed.py",),
    ),  # seen as: mixed_diagonal of a forward that makes the decoder's weight (scale.exp() * w) first: zero for w,
    # scale
    Mutant(
        "a data point with an infinite loss is fitted",
        "estimate/data_pass.py",
        "    if not all_finite(loss):\n",
        "    if bool(torch.isnan(loss).any()):\n",
        ("estimate/test_estimators.py", "test_bad_input.py", "laplace/test_adversarial.py"),
    ),  # seen as: Poisson outputs of 100 (exp overflows): no error that names the point; the evidence is -inf
    Mutant(
        "the Jacobian of a product with data is taken from the first data point",
        "estimate/propagated/recursion/plan.py",
        "        if not weights:\n            return self._fixed(node, data)\n",
        "        if not weights:\n            return self._fixed(node, data, trusted=True)\n",
        ("estimate/test_kfra.py", "laplace/test_recursive.py"),
    ),  # seen as: kfra of a network with torch.bmm(graph, layer(x)), another graph for each point: refused before
    Mutant(
        "of a weight that is used twice, what lies between its uses is left out of a reduced sum",
        "estimate/propagated/recursion/layers.py",
        "return self.block.reduce and len(self.members) > 1",
        "return self.block.reduce and len(self.members) > 2",
        ("estimate/test_kfra.py", "laplace/test_recursive.py"),
    ),  # seen as: kfra(sharing="reduce") of a network that applies one layer twice: the output factor lacks cross terms
    Mutant(
        "blocks of the Hessian are those of tensors, not of layers",
        "estimate/exact_hessian.py",
        'places = partition(space, "layer")',
        'places = partition(space, "tensor")',
        ("estimate/test_exact_blocks.py", "estimate/test_estimators.py", "laplace/test_structures.py"),
    ),  # seen as: hessian(structure="blocks"): second derivatives between a weight and its bias are zero
    # -- predictive and evidence (5) ----------------------------------------------------------------------------------
    Mutant(
        "covariances of candidates are not divided by the scale of the curvature",
        "predictive/candidates.py",
        "curvature.with_prior(delta / scale).quadratic(pieces) / scale",
        "curvature.with_prior(delta / scale).quadratic(pieces)",
        ("evidence/test_grid.py", "predictive", "laplace/test_tuning.py"),
    ),  # seen as: gridsearch or pseudo_data with "probit_full" or "bridge" at a temperature, or a count, of another
    # scale
    Mutant(
        "a score of one's own counts a batch once, however many points it has",
        "evidence/grid.py",
        "torch.tensor(each, dtype=torch.float64) * len(batch.value)",
        "torch.tensor(each, dtype=torch.float64)",
        ("evidence/test_grid.py", "laplace/test_tuning.py"),
    ),  # seen as: grid(score=f).scores: too small by the batch size, and a short last batch weighs as a full one
    Mutant(
        "parameters of the head that gives the noise count among those of the mean",
        "evidence/tuners.py",
        "return (1 - gamma[:-1].clamp_min(0).sum() / targets).clamp_min(0.1)",
        "return (1 - gamma.clamp_min(0).sum() / targets).clamp_min(0.1)",
        ("evidence", "tables/test_noise.py", "laplace/test_calibration.py"),
    ),  # seen as: share_left, point_share: noise of a table with learned noise too wide for the network alone
    Mutant(
        "the noise level is searched in the range of precisions",
        "evidence/tuners.py",
        "    low[precisions:], high[precisions:] = map(log, noise)\n",
        "",
        ("evidence", "laplace/test_tuning.py"),
    ),  # seen as: evidence.gradient of targets that are fitted exactly: sigma falls to 1e-10, or rises above its range
    Mutant(
        "the residuals of some rows stand for all rows without being scaled up",
        "evidence/marginal.py",
        "return GaussianFit(round(self.targets * scale), self.squares * scale)",
        "return GaussianFit(round(self.targets * scale), self.squares)",
        ("evidence", "tables/test_fitting.py", "tables/test_network.py"),
    ),  # seen as: Evidence.scaled(10) of a regression, long tables of which some rows are used: sigma too small by 3
    # -- training and subnetwork (3) ----------------------------------------------------------------------------------
    Mutant(
        "the temperature does not divide the log-likelihood that weights are trained on",
        "training/objective.py",
        "return likelihood.total_loss(f, y) / (size * self.temperature)",
        "return likelihood.total_loss(f, y) / size",
        ("training", "laplace/test_training.py"),
    ),  # seen as: train(temperature=5): losses, and weights that the prior pulls too little
    Mutant(
        "modules that were frozen in eval mode are put into train mode",
        "training/train_mode.py",
        "        if not model.training:\n            model.train()\n",
        "        model.train()\n",
        ("training", "laplace/test_training.py"),
    ),  # seen as: train(...) of a model in train mode with one BatchNorm in eval mode: its running statistics change
    Mutant(
        "weights without a variance are chosen first",
        "subnetwork/choices.py",
        "if bool(torch.isnan(scores).any()):",
        "if bool(torch.isnan(scores).all()):",
        ("test_subnetwork.py", "test_bad_input.py"),
    ),  # seen as: largest_variance(space, v, n) with one NaN in v: an error before, now a sub-network with that weight
    # -- laplace (5) --------------------------------------------------------------------------------------------------
    Mutant(
        "held-out data see an empirical Fisher multiplied by the noise, not divided by it",
        "laplace/tuning.py",
        "float(self.hyper.sigma_noise) ** -rest if rest",
        "float(self.hyper.sigma_noise) ** rest if rest",
        ("laplace/test_tuning.py", "laplace/test_linear_gaussian.py"),
    ),  # seen as: gridsearch of a regression with estimator="empirical" and sigma_noise other than 1: another winner
    Mutant(
        "draws are scored at unit noise",
        "laplace/tuning.py",
        "    if search.evidence.has_noise:\n"
        "        likelihood = likelihood.at_noise(float(search.hyper.sigma_noise))\n",
        "",
        ("laplace/test_tuning.py", "laplace/test_options.py"),
    ),  # seen as: gridsearch of a regression with pred_type="nn" and sigma_noise=0.1: another precision wins
    Mutant(
        "the noise of a network without error bars is that of the evidence",
        "laplace/calibration.py",
        "return float((fit.squares / fit.targets).sqrt() / left)",
        "return float((fit.squares / fit.targets).sqrt() / left.sqrt())",
        ("laplace/test_calibration.py", "tables/test_fitting.py", "tables/test_noise.py"),
    ),  # seen as: point_noise, the MAP row of a small table: intervals too narrow by the root of 1 - gamma / N
    Mutant(
        "leverages leave out the temperature",
        "laplace/calibration.py",
        "(variance / (square * float(la.temperature)))",
        "(variance / square)",
        ("laplace/test_calibration.py", "tables/test_fitting.py"),
    ),  # seen as: leave_one_out of a posterior at temperature 0.5 or 2: not the residuals of fits without a row
    Mutant(
        "the first batch of an iterator is only looked at",
        "laplace/data.py",
        "return first, chain([first], iterator) if one_shot(loader) else loader",
        "return first, iterator if one_shot(loader) else loader",
        ("laplace/test_loaders.py", "laplace/test_heads.py"),
    ),  # seen as: a last-layer fit(iter(loader)): n_data and curvature lack the first batch
    # -- tables (3) ---------------------------------------------------------------------------------------------------
    Mutant(
        "words among numbers are unknown also where training had such words",
        "tables/encoder.py",
        "unknown = missing if not self.indicator else unread & (not self.unread)",
        "unknown = missing if not self.indicator else unread",
        ("tables/test_table.py", "tables/test_bad_tables.py"),
    ),  # seen as: a row with "?" in a column that had "?" in training: flagged, and predicted from examples' values
    Mutant(
        "a class is called by the first way to write it, not by the most frequent",
        "tables/targets.py",
        "spelt[word].most_common(1)[0][0]",
        "next(iter(spelt[word]))",
        ("tables/test_table.py", "tables/test_fitting.py", "tables/test_bundle.py"),
    ),  # seen as: a target with YES once, then yes a hundred times: the classes of predictions are called YES
    Mutant(
        "kept rows exchange their random numbers when another chunk is seen",
        "tables/encoder.py",
        "self.keys = keys[chosen]",
        "self.keys = np.sort(keys)[: self.most]",
        ("tables/test_table.py", "tables/test_bad_tables.py"),
    ),  # seen as: Encoder.examples depend on how a table is cut into chunks, and what unknown values stand for with
    # them
    # -- reporting and others (2) -------------------------------------------------------------------------------------
    Mutant(
        "the error among the surest rows is that among the first rows",
        "reporting/statistics.py",
        "risk = wrong[order].cumsum(0) / kept",
        "risk = wrong.cumsum(0) / kept",
        ("reporting",),
    ),  # seen as: errors(classes)["risk"], the curve of a report: flat, however well uncertainty sorts the rows
    Mutant(
        "tensors chosen by name from a sub-network come whole",
        "params.py",
        "        if self.index is None:\n            return smaller\n",
        "        if self.index is None or names is not None:\n            return smaller\n",
        ("test_params.py", "test_subnetwork.py", "test_directions.py"),
    ),  # seen as: space.select(mask=m).select(["0.weight"]).size is that of the whole tensor
)


GROUPS = (
    Mutant(
        "running variances grow with the scale of the weights, and not with its square",
        "tape/invariance.py",
        '("running_var", 2)',
        '("running_var", 1)',
        ("tape/test_invariance.py",),
    ),
    Mutant(
        "the shift behind a norm may keep its size while the scale grows",
        "tape/degrees.py",
        "made.append(_equal(out, node.inputs[bias]))",
        "pass",
        ("tape/test_invariance.py",),
    ),
    Mutant(
        "other groups with as many precisions leave the posterior as it was",
        "laplace/base.py",
        "prior_groups=groups, prior_precision=self.prior_precision.clone()",
        "prior_groups=groups",
        ("laplace/test_prior_groups.py",),
    ),
)


CONTINUAL = (
    Mutant(
        "importances of Synaptic Intelligence are negative where the loss falls",
        "training/importance.py",
        "self.omega -= self.points",
        "self.omega += self.points",
        ("training/test_continual.py",),
    ),
    Mutant(
        "importances are taken from the loss of one data point",
        "training/importance.py",
        "self.points * gradient *",
        "gradient *",
        ("training/test_continual.py",),
    ),
    Mutant(
        "quadratics around weights of their own are all taken around the latest",
        "training/quadratic_term.py",
        "shift = pulled if shift is None else shift + pulled",
        "shift = None",
        ("training/test_continual.py",),
    ),
    Mutant(
        "the quadratic of earlier tasks is not divided by the data points",
        "training/quadratic_term.py",
        "gradient.mul_(scale / self.points)",
        "gradient.mul_(scale)",
        ("training/test_continual.py",),
    ),
    Mutant(
        "the multiplier of tasks is left out",
        "training/continual.py",
        "generator=self.generator) * self.multiplier",
        "generator=self.generator)",
        ("training/test_continual.py",),
    ),
    Mutant(
        "the base prior stays around zero after a task",
        "training/continual.py",
        "base = replace(base, mean=centre)",
        "base = replace(base, mean=0.0)",
        ("training/test_continual.py",),
    ),
    Mutant(
        "factors of Kronecker products are merged with the trace of the wrong side",
        "linalg/sums.py",
        "(_times(factor[0], trace[1])",
        "(_times(factor[0], trace[0])",
        ("linalg/test_sums.py", "training/test_continual.py"),
    ),
    Mutant(
        "a diagonal is rotated by its columns alone",
        "linalg/sums.py",
        "matrix if basis.row_vectors is None else basis.row_vectors.square().mT @ matrix",
        "matrix",
        ("linalg/test_sums.py",),
    ),
    Mutant(
        "a posterior as a prior forgets the noise of its data",
        "laplace/base.py",
        "curvature = scaled(fitted.curvature, 1 if float(scale) == 1 else scale)",
        "curvature = fitted.curvature",
        ("laplace/test_previous_posterior.py",),
    ),
    Mutant(
        "a posterior as a prior forgets the prior that it had",
        "laplace/base.py",
        "curvature if hyper.earlier is None else total(curvature, hyper.earlier)",
        "curvature",
        ("laplace/test_previous_posterior.py",),
    ),
)

POSITIONS = (
    Mutant(
        "a row of positions that passes no gradient counts as any other",
        "tangent/record.py",
        "by_count or (padding is not None and bool((index == padding).any()))",
        "by_count",
        ("tangent/test_corners.py", "tangent/test_recorder.py"),
    ),
    Mutant(
        "positions with gaps are taken for those that follow one another",
        "tangent/sources.py",
        "start < 0 or not torch.equal(index.flatten(), torch.arange(start, stop).to(index))",
        "start < 0",
        ("tangent/test_corners.py", "tangent/test_recorder.py"),
    ),
    Mutant(
        "an exact block ends where the first batch's positions do",
        "estimate/kronecker.py",
        "        if not _is_matrix(group):\n            segments = _grown",
        "        if False:\n            segments = _grown",
        ("tangent/test_corners.py", "tangent/test_recorder.py"),
    ),
    Mutant(
        "positions that cancel are squared by their products in float32 too",
        "linalg/rows.py",
        "return self.left.dtype == torch.float64 and needed <",
        "return needed <",
        ("linalg/test_rows.py",),
    ),
    Mutant(
        "a number that requires gradients stands for entries that have derivatives of their own",
        "linalg/rows.py",
        "    if weight.requires_grad:  # its",
        "    if False:  # its",
        ("linalg/test_rows.py",),
    ),
)

MUTANTS = (
    LINALG
    + ESTIMATE
    + TANGENT
    + ABOVE
    + APPLICATIONS
    + SECOND_BELOW
    + SECOND_ABOVE
    + THIRD
    + FOURTH
    + GROUPS
    + CONTINUAL
    + POSITIONS
)
