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
        "parts of blocks are put in order by a permutation instead of its inverse",
        "linalg/blocks.py",
        "position.argsort()",
        "position",
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
        "linalg/rows.py",
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
        "loss = -evidence.log_marginal(found, level, temperature)",
        "loss = -evidence.log_marginal(found, level)",
        ("evidence", "laplace/test_tuning.py"),
    ),
    Mutant(
        "covariances count once, not twice, in the variance of a difference of logits",
        "predictive/links.py",
        "- 2 * covariance",
        "- covariance",
        ("predictive/test_links.py", "predictive/test_predictions.py"),
    ),
    Mutant(
        "the variance of a log-noise is believed however large it is",
        "predictive/amounts.py",
        "of_level.clamp(0, SPREAD)",
        "of_level.clamp_min(0)",
        ("predictive/test_amounts.py", "tables/test_noise.py"),
    ),
    Mutant(
        "negative numbers have the probability of zero in the distribution function of counts",
        "predictive/counts.py",
        "torch.where(counts < 0, 0.0, found)",
        "found",
        ("predictive/test_counts.py",),
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
        "laplace/hyper.py",
        "self._prior_precision, self._sigma_noise = before\n",
        "self._prior_precision = before[0]\n",
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
        "laplace/functional.py",
        "torch.Generator().manual_seed(self.seed)",
        "torch.Generator().manual_seed(0)",
        ("laplace/test_linear_gaussian.py", "laplace/test_independent_outputs.py"),
    ),
    Mutant(
        "a last layer is accepted that the output is no linear function of",
        "laplace/last_layer.py",
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
        "training/run.py",
        "/ (2 * self.points) - fit",
        "/ self.points - fit",
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
        "return inside | (probabilities == probabilities.max(1, keepdim=True).values)",
        "return inside",
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
        "mean[1] += found[0].var(1, correction=min(1, versions.shape[1] - 1))",
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

MUTANTS = LINALG + ESTIMATE + TANGENT + ABOVE + APPLICATIONS
