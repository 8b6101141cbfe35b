"""Defaults of what lapwing adds to laplace-torch: a script that leaves an argument out means the same in every version.

Whoever changes a default changes the results of others: change its row here and say so in the changelog.
"""

from __future__ import annotations

import ast
import inspect
import operator
from typing import Any

import pytest

import lapwing
import lapwing.tables.bundle
import lapwing.tables.estimators
import lapwing.tables.fit

MIB_256 = 2**28
ROWS = """
BaseLaplace.linear_mode(solver='auto', max_passes=1000)
BaseLaplace.fit(checkpoint_every=50)
BaseLaplace.predict_proba(link_approx='probit', n_samples=100)
BaseLaplace.predict_moments(joint=False, diagonal_output=False)
BaseLaplace.predictive(pred_type='glm', link_approx='probit', n_samples=100)
BaseLaplace.optimize_prior_precision(optimize_sigma_noise=False, at='trained', traces='exact', max_passes=1000)
BaseLaplace.save(weights=True)
LowRankLaplace(rank=100)
SubnetLaplace.sample(n_samples=100)
SubnetLaplace.log_prob(normalized=True)
Gaussian(sigma=1.0)
Gaussian.predictive(sigma=1.0)
Gaussian.signal_and_noise(sigma=1.0)
HeteroscedasticGaussian.predictive(sigma=1.0)
HeteroscedasticGaussian.signal_and_noise(sigma=1.0)
Likelihood.probabilities(link='probit')
Likelihood.predictive(sigma=1.0)
Likelihood.target_log_prob(sigma=1.0)
Likelihood.signal_and_noise(sigma=1.0)
Poisson.predictive(sigma=1.0)
ParamSpace.groups(by='tensor')
Prior(mean=0.0, structure='isotropic')
Prior.isotropic(precision=1.0, mean=0.0)
Prior.layerwise(precision=1.0, mean=0.0)
Prior.per_tensor(precision=1.0, mean=0.0)
Prior.grouped(precision=1.0, mean=0.0)
Prior.by_name(precision=1.0, mean=0.0)
Prior.diagonal(precision=1.0, mean=0.0)
PriorGroups.of(structure='grouped')
ScaleInvariantGroups.partition(rest='one')
Tangent(budget=MIB_256, differentiable=False, evaluate=False)
alignment(tolerance=1e-05, iterations=500)
attach(structure='auto', subset_of_weights='all', prior_structure='scalar', rows=1000, progress_bar=False)
load(strict=True)
marglik_training(checkpoint_every=1)
scale_invariant_groups(tolerance=0.25)
to_mode(steps=200, tolerance=1e-06)
estimate.blocks(by='layer')
estimate.by_name(source='exact', draws=1)
estimate.dual(limit=20000, independent_outputs=False)
estimate.empirical(structure='full')
estimate.hessian(structure='full')
estimate.kfac(samples=1)
estimate.low_rank(gram_rows=None, passes=6)
estimate.matrix_free(preconditioner='none', iterations=1000, probes=16, steps=64)
estimate.mixed_diagonal(columns=32, exact_bottleneck=False)
estimate.monte_carlo(samples=1)
estimate.projections(samples=1, distribution='rademacher')
evidence.Evidence(noise_power=2)
evidence.Evidence.settled(sigma=1.0, temperature=1.0)
evidence.Evidence.precision(sigma=1.0, temperature=1.0)
evidence.Evidence.log_marginal(sigma=1.0, temperature=1.0)
evidence.Evidence.effective_parameters(sigma=1.0, temperature=1.0)
evidence.Evidence.sampled_effective_parameters(sigma=1.0, temperature=1.0, samples=100)
evidence.EvidenceAtMode.of(exact=False)
evidence.EvidenceAtMode.settled(sigma=1.0, temperature=1.0)
evidence.EvidenceAtMode.mode(sigma=1.0, temperature=1.0)
evidence.em(sigma=1.0, temperature=1.0, fixed_noise=False, rounds=1000, tolerance=1e-08)
evidence.gradient(sigma=1.0, temperature=1.0, fixed_noise=False, rounds=100, tolerance=1e-06)
linalg.CorrectedKronecker(power=2)
linalg.Dual(sharing=1)
linalg.Effort(iterations=1000, probes=16, steps=64, seed=0)
linalg.Kronecker(joint_bias=True, factored_damping=False)
linalg.Precision.to_matrix(exponent=1)
predictive.dirichlet(normalise=False)
predictive.network_draws(differentiable=False)
predictive.probabilities(link='probit')
serialize.read(device='cpu')
subnetwork.LargestVarianceSWAGSubnetMask(likelihood='classification', swag_n_snapshots=40, swag_snapshot_freq=1)
subnetwork.LargestVarianceSWAGSubnetMask(swag_lr=0.01)
subnetwork.LastLayerSubnetMask(n_layers=1)
subnetwork.swag_variance(snapshots=40, every=1, lr=0.01, momentum=0.9, decay=0.0003)
tangent.FeatureMap(budget=MIB_256)
tangent.FeatureTangent(budget=MIB_256, differentiable=False, evaluate=False)
training.Continual(method='online', structure='kron', prior_precision=1.0, multiplier=1.0, terms='keep', epsilon=0.1)
training.Continual.learn(epochs=20, checkpoint_every=1)
training.Continual.predict(pred='glm', link='probit')
training.Continual.unseen(share=0.99)
training.EvidenceTuner(prior='per_tensor', precision=1.0, burn_in=0, every=1, hyper_steps=100, hyper_lr=0.1)
training.EvidenceTuner(temperature=1.0, fixed_noise=False, noise_power=2)
training.EvidenceTuner.add_penalty_gradient(scale=1.0)
training.GaussNewton(structure='kron', estimator='mc', weight_decay=0.0, tau_decay=0.95, tau_every=5, zeta_decay=0.95)
training.GaussNewton(zeta_every=20, moving_average=0.9, refresh=5, momentum=False, verify=True, frozen=False)
training.GaussNewton.levenberg_marquardt(structure='full')
training.GaussNewton.fit(full_batch=False, tolerance=0.0, progress_bar=False, checkpoint_every=100)
training.LaplacianAutoencoder(likelihood='mse', curvature='sampled', samples=1, prior_precision=1.0, start=0.0)
training.LaplacianAutoencoder(forgetting=0.0001, weight=1.0, rescale=False, temperature=1.0, at='draw')
training.LaplacianAutoencoder.fit(checkpoint_every=100)
training.LaplacianAutoencoder.fit_posthoc(epochs=0, checkpoint_every=100, tune_prior=False)
training.LaplacianAutoencoder.latent(samples=100, method='sample')
training.LaplacianAutoencoder.reconstruct(samples=100, method='sample')
training.LaplacianAutoencoder.decode(samples=100, method='sample')
training.LaplacianAutoencoder.log_prob(samples=100)
training.LaplacianAutoencoder.measure_entropy(samples=100)
training.LaplacianAutoencoder.typicality(samples=100)
training.LaplacianAutoencoder.ood_scores(samples=100)
training.LaplacianAutoencoder.embed(n=100)
training.LaplacianAutoencoder.impute(n=5, steps=5, average=5)
training.LaplacianAutoencoder.sample(steps=5, average=5)
training.adam(sigma=1.0, steps=100, lr=0.1, temperature=1.0, fixed_noise=False)
training.train(prior='per_tensor', precision=1.0, scheduler_per_batch=False, epochs=300, burn_in=0, every=1)
training.train(hyper_steps=100, hyper_lr=0.1, temperature=1.0, fixed_noise=False, noise_power=2, keep_every=1)
tables.fit.fit_table(task='auto', seed=0, noise='auto')
tables.bundle.Bundle.predict(level=0.9)
tables.bundle.Bundle.frame(level=0.9)
tables.estimators.LaplaceRegressor(width=50, depth=1, kind='mlp', activation='tanh', structure='auto')
tables.estimators.LaplaceClassifier(width=50, depth=1, kind='mlp', activation='tanh', structure='auto')
"""


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_what_is_left_out_means_the_same(row: str) -> None:
    call = ast.parse(row, mode="eval").body
    assert isinstance(call, ast.Call)
    parameters = inspect.signature(operator.attrgetter(ast.unparse(call.func))(lapwing)).parameters
    for keyword in call.keywords:
        assert keyword.arg is not None
        expected: Any = MIB_256 if isinstance(keyword.value, ast.Name) else ast.literal_eval(keyword.value)
        found = parameters[keyword.arg].default
        assert (found, type(found)) == (expected, type(expected)), f"{keyword.arg} of {row}"
