"""Product lines that tests depend on: (file below jaxtrain/, line as it is, as it must not be, test that sees).

CI patches each in a copy of the package and shows that its test fails (tests/test_mutations.py). A line that is gone
makes that test fail too, so this list stays true.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """`old` must stand in `file` exactly once."""

    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "core/guard.py",
        "jnp.where(finite, n, o)",
        "n",
        "core/test_core_guard.py::test_a_bad_batch_leaves_everything_bit_equal_and_is_counted",
    ),
    Mutation(
        "core/step.py",
        "per_weight = 1.0 / (weight * scale)",
        "per_weight = 1.0 / (rows * scale)",
        "core/test_core_step.py::test_row_weights_are_divided_by_once_over_all_micro_batches",
    ),
    Mutation(
        "core/step.py",
        "x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)",
        "x.reshape(count, x.shape[0] // count, *x.shape[1:])",
        "core/test_core_step.py::test_micro_batches_take_every_nth_row_so_that_none_is_all_padding",
    ),
    Mutation(
        "core/step.py",
        'stream_key(spec.seed, "module", state["step"], index * spec.lanes + lane)',
        'stream_key(spec.seed, "module", 0, index * spec.lanes + lane)',
        "core/test_core_step.py::test_dropout_differs_between_layers_micro_batches_and_steps",
    ),
    Mutation(
        "core/step.py",
        'stream_key(spec.seed, "module", state["step"], index * spec.lanes + lane)',
        'stream_key(spec.seed, "module", state["step"], index)',
        "core/test_core_step.py::test_dropout_differs_between_layers_micro_batches_and_steps",
    ),
    Mutation(
        "core/step.py",
        "jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *parts)",
        "parts[0]",
        "core/test_core_step.py::test_accumulated_gradient_equals_full_batch",
    ),
    Mutation(
        "core/guard.py",
        "jax.lax.cond(finite, update",
        "jax.lax.cond(True, update",
        "core/test_core_guard.py::test_a_bad_batch_leaves_everything_bit_equal_and_is_counted",
    ),
    Mutation(
        "core/step.py",
        "return decay * old + (1.0 - decay) * new",
        "return new",
        "core/test_core_step.py::test_the_average_follows_min_of_decay_and_one_plus_n_over_ten_plus_n",
    ),
    Mutation(
        "core/step.py",
        '"updates": state["updates"] + finite.astype(jnp.int32)',
        '"updates": state["updates"] + 1',
        "core/test_core_schedules.py::test_a_skipped_update_does_not_move_the_schedule",
    ),
    Mutation(
        "core/schedules.py",
        "optax.linear_schedule(0.0, peak_lr, warmup)",
        "optax.constant_schedule(peak_lr)",
        "core/test_core_schedules.py::test_rates_equal_the_expected_curve_of_the_resume_case",
    ),
    Mutation(
        "core/objectives.py",
        'jnp.asarray(mask * over_elements(batch["weights"], mask))',
        "mask",
        "core/test_core_objectives.py::test_the_loss_is_the_weighted_sum_over_real_rows",
    ),
    Mutation(
        "core/metrics.py",
        ".add(real.astype(jnp.int32))",
        ".add(1)",
        "core/test_core_metrics.py::test_uneven_batches_give_the_figures_of_all_rows",
    ),
    Mutation(
        "core/optimizer.py",
        "{name: p.ndim - is_stacked(name) >= 2 and not _is_embedding(name) for name, p in params.items()}",
        "{name: True for name in params}",
        "core/test_core_optimizer.py",
    ),
    Mutation(
        "core/moments.py",
        "jnp.maximum(codes, 1.0)",
        "codes",
        "core/test_core_moments.py::test_a_second_moment_above_zero_is_never_read_as_zero",
    ),
    Mutation(
        "core/moments.py",
        "and not whole(name)",
        "",
        "core/test_core_moments.py::test_a_state_weighs_what_the_types_say",
    ),
    Mutation(
        "core/moments.py",
        "min(long, key=lambda i: (shape[i], -i))",
        "max(long, key=lambda i: (shape[i], -i))",
        "parallel/test_parallel_moments.py::test_moments_in_8_bits_are_not_sent",
    ),
    Mutation(
        "parallel/offload.py",
        'jax.device_put(state["opt_state"], working)',
        'state["opt_state"]',
        "parallel/test_parallel_offload.py::test_the_program_of_a_gpu_fetches_every_moment_and_puts_it_back",
    ),
    Mutation(
        "core/precision.py",
        "jnp.maximum(scale / 2, MIN_SCALE)",
        "scale",
        "core/test_core_precision.py",
    ),
    Mutation(
        "core/augment.py",
        "jax.random.bernoulli(key, 0.5, (images.shape[0], 1, 1, 1))",
        "jax.random.bernoulli(key, 0.0, (images.shape[0], 1, 1, 1))",
        "core/test_core_augment.py",
    ),
    Mutation(
        "models/conv.py",
        "(self.size - 1 - shift) // self.stride + 1)",
        "(self.size - 1 - shift) // self.stride)",
        "models/test_models_conv.py::test_values_and_both_gradients_are_those_of_lax",
    ),
    Mutation(
        "models/conv.py",
        "taken |= hit",
        "pass",
        "models/test_models_conv.py::test_of_equal_ones_the_first_gets_the_gradient",
    ),
    Mutation(
        "models/layers.py",
        "stat[...] = jnp.where(any_real, moved, old)",
        "stat[...] = moved",
        "models/test_models_batchnorm.py::test_a_call_without_a_real_row_leaves_the_statistics_alone",
    ),
    Mutation(
        "models/layers.py",
        "jnp.sum(jnp.where(real, x, 0.0), axes) / divisor",
        "jnp.mean(x, axes)",
        "models/test_models_batchnorm.py::test_padded_garbage_moves_no_real_row_and_no_statistic",
    ),
    Mutation(
        "data/order.py",
        "start + slot % real",
        "start + slot % rows",
        "data/test_data_order.py::test_padding_repeats_the_real_rows_of_its_own_batch",
    ),
    Mutation(
        "data/dataset.py",
        "_statistics(source, splits.train, data.normalize)",
        "_statistics(source, np.arange(len(source)), data.normalize)",
        "data/test_data_dataset.py::test_validation_and_test_rows_do_not_reach_the_statistics",
    ),
    Mutation(
        "parallel/mesh.py",
        'PartitionSpec(*axes[: getattr(x, "ndim", 0)])',
        "PartitionSpec()",
        "parallel/test_parallel_mesh.py::test_each_device_holds_its_share_of_the_rows_and_all_of_the_scalars",
    ),
    Mutation(
        "checkpoint/seal.py",
        "if wanted.get(name) != there.get(name):",
        "if name not in there:",
        "checkpoint/test_checkpoint_store.py::test_a_damaged_array_file_is_found_and_named",
    ),
    Mutation(
        "checkpoint/seal.py",
        "if text != as_written or digest",
        "if digest",
        "checkpoint/test_checkpoint_damage.py::test_damage_to_any_file_is_found_named_and_the_step_before_is_used",
    ),
    Mutation(
        "checkpoint/store.py",
        "shutil.rmtree(path, ignore_errors=True)\n                if pause is None",
        "if pause is None",
        "checkpoint/test_checkpoint_store.py::test_a_failed_save_surfaces_and_the_step_before_stays",
    ),
    Mutation(
        "checkpoint/store.py",
        "if unsealed:  # a step that a resume has passed over",
        "if False:",
        "checkpoint/test_checkpoint_killed.py::test_a_left_over_step_is_named_and_does_not_stop_the_save_of_that_step",
    ),
    Mutation(
        "hooks/control.py",
        "if not math.isfinite(value):\n            return False",
        "if False:\n            return False",
        "hooks/test_hooks_control.py::test_fault_loop_nan_metric_the_best_is_the_best_finite_value",
    ),
    Mutation(
        "hooks/folder.py",
        'if row["step"] < step or',
        "if True or",
        "hooks/test_hooks_folder.py::test_truncate_drops_what_a_resume_writes_again",
    ),
    Mutation(
        "hooks/writers.py",
        "purge_step=step + 1 if step else None",
        "purge_step=None",
        "hooks/test_hooks_writers.py::test_a_run_resumed_from_an_older_step_shows_each_tag_once_a_step",
    ),
    Mutation(
        "loop.py",
        "flight.popleft().block_until_ready()",
        "flight.popleft()",
        "hooks/test_hooks_loop.py::test_run_ahead_is_bounded",
    ),
    Mutation(
        "parallel/rules.py",
        '(r".*\\.(qkv|gate|up)\\.kernel", (None, "tensor")),',
        '(r".*\\.(qkv|gate|up)\\.kernel", ("tensor", None)),',
        "parallel/test_parallel_rules.py::test_tensor_splits_columns_then_rows",
    ),
    Mutation(
        "session.py",
        "[CheckSaves(self.store.poll), *writers,",
        "[*writers,",
        "run/test_run_ways.py::test_a_failed_save_ends_the_run_at_the_next_step_and_not_at_the_next_save",
    ),
    Mutation(
        "core/optimizer.py",
        "p.ndim - is_stacked(name) >= 2",
        "p.ndim >= 2",
        "models/test_models_stack.py::test_norms_and_biases_of_a_stack_do_not_decay_and_its_kernels_do",
    ),
    Mutation(
        "core/optimizer.py",
        "tuple(range(is_stacked(name), p.ndim - 1))",
        "tuple(range(p.ndim - 1))",
        "models/test_models_stack.py::test_an_update_of_a_stack_is_that_of_its_blocks",
    ),
    Mutation(
        "models/layers.py",
        "dx -= jnp.mean(dz, -1, keepdims=True)",
        "pass",
        "models/test_models_layers.py::test_norms_of_rows_and_their_gradients_are_those_of_flax",
    ),
    Mutation(
        "sentinel.py",
        "if programs != self._programs:",
        "if not programs:",
        "run/test_run_sentinel.py::test_the_array_that_changed_is_named",
    ),
    Mutation(
        "hooks/writers.py",
        "on_save = start",
        "on_save = Hook.on_save",
        "hooks/test_hooks_writers.py::test_the_clock_times_the_steps_since_the_last_row_evaluation_or_save",
    ),
    Mutation(
        "data/feed.py",
        "np.arange(*self._part)",
        "np.arange(self._batch)",
        "data/test_data_feed.py::test_a_part_of_each_batch_is_all_that_is_read",
    ),
    Mutation(
        "hardware/peak.py",
        'time.time() - kept["time"] < DAY',
        'time.time() - kept["time"]',
        "hardware/test_hardware_peak.py::test_the_cpu_is_measured_once_a_day_and_counts_once",
    ),
    Mutation(
        "loop.py",
        "min(many.steps, _border(hooks, step, stop, log_every) - step)",
        "min(many.steps, stop - step)",
        "run/test_run_dispatch.py::test_no_group_goes_over_a_border",
    ),
    Mutation(
        "build.py",
        "jax.lax.fori_loop(0, count,",
        "jax.lax.fori_loop(0, 1,",
        "run/test_run_dispatch.py::test_one_step_and_many_leave_the_same_run",
    ),
    Mutation(
        "parallel/rules.py",
        "return NamedSharding(mesh, _dividing(specs[name], leaf.shape, mesh))",
        "continue",
        "parallel/test_parallel_rules.py::test_moments_and_averages_are_split_like_their_parameter",
    ),
    Mutation(
        "build.py",
        "partial(jit, donate_argnums=0, ",
        "partial(jit, ",
        "run/test_run_ways.py::test_the_state_given_to_a_step_is_donated",
    ),
    Mutation(
        "session.py",
        "leaf.delete()",
        "pass",
        "run/test_run_ways.py::test_close_gives_the_device_memory_back",
    ),
    Mutation(
        "session.py",
        "best = self.store.best() or self.store.latest()",
        "best = self.store.latest()",
        "run/test_run_ways.py::test_test_split_is_read_once_on_the_best_sealed_step",
    ),
    Mutation(
        "session.py",
        'hook.load_state_dict(sealed.meta["hooks"][type(hook).__name__])',
        "pass",
        "run/test_run_resume.py::test_patience_counts_over_a_resume",
    ),
    Mutation(
        "session.py",
        "first = sealed.step if sealed else 0",
        "first = 0",
        "run/test_run_resume.py::test_stopped_and_resumed_equals_uninterrupted",
    ),
    Mutation(
        "loop.py",
        "if stops and not logged:",
        "if False:",
        "run/test_run_ways.py::test_a_run_that_is_stopped_early_has_a_row_for_its_last_step",
    ),
    Mutation(
        "hooks/control.py",
        "        self._poll()\n",
        "        pass\n",
        "run/test_run_ways.py::test_a_failed_save_ends_the_run_at_the_next_step_and_not_at_the_next_save",
    ),
    Mutation(
        "session.py",
        "if saver.evaluations and saver.best.value is None:",
        "if saver.best.value is None:",
        "run/test_run_ways.py::test_a_time_budget_that_ends_before_the_first_evaluation_tests_the_last_step",
    ),
    Mutation(
        "runner.py",
        'if sealed.meta["data"] != job.dataset.fingerprint():',
        "if False:",
        "run/test_run_resume.py::test_a_resume_with_other_data_is_refused",
    ),
    Mutation(
        "config/fields.py",
        'extra="forbid"',
        'extra="ignore"',
        "config/test_config_errors.py",
    ),
    Mutation(
        "data/text.py",
        "permute(self.seed, xp.asarray(epoch) + _SHIFT",
        "permute(self.seed, xp.asarray(epoch) * 0 + _SHIFT",
        "data/test_data_windows.py::test_each_epoch_has_its_own_shift_and_all_shifts_come",
    ),
    Mutation(
        "data/text.py",
        "mask[:, None] & (place[:, 1:] < len(tokens))",
        "mask[:, None] & (place[:, :-1] < len(tokens))",
        "data/test_data_windows.py::test_every_target_counts_exactly_once_in_the_figures",
    ),
    Mutation(
        "data/text.py",
        "np.where(known[place] == points, place, len(known))",
        "place",
        "data/test_data_text.py::test_no_character_is_taken_for_another",
    ),
    Mutation(
        "data/text.py",
        'known = np.unique(parts["train"])',
        "known = np.unique(np.concatenate(list(parts.values())))",
        "data/test_data_text.py::test_the_vocabulary_comes_from_the_training_part_alone",
    ),
    Mutation(
        "data/feed.py",
        "dataset.take(resident, rows, epoch)",
        "dataset.take(resident, rows, 0)",
        "data/test_data_windows.py::test_resident_direct_and_prefetch_give_the_same_windows_over_three_epochs",
    ),
    Mutation(
        "data/tokens.py",
        "add_special_tokens=False",
        "add_special_tokens=True",
        "data/test_data_tokens.py::test_a_template_adds_nothing_to_a_text",
    ),
    Mutation(
        "data/dataset.py",
        "rows = rows[source.split == 2]",
        "pass",
        "data/test_data_make.py::test_of_a_source_with_a_test_split_only_that_counts",
    ),
    Mutation(
        "data/dataset.py",
        "train[:: -(-len(train) // STATISTICS_ROWS)]",
        "train[:STATISTICS_ROWS]",
        "data/test_data_pictures.py::test_of_many_pictures_evenly_taken_ones_are_measured",
    ),
    Mutation(
        "data/sources.py",
        "np.array([-1, 2], np.int8)",
        "np.array([0, 2], np.int8)",
        "data/test_data_mnist.py::test_fraction_and_seed_choose_the_validation_and_never_touch_the_test",
    ),
    Mutation(
        "data/split.py",
        "None if labels is None else labels[open_]",
        "None",
        "data/test_data_split.py::test_open_rows_are_divided_class_by_class_and_by_the_seed",
    ),
    Mutation(
        "models/gpt.py",
        "jnp.arange(length)[None, :] <= places[:, None]",
        "jnp.arange(length)[None, :] <= places[:, None] + 1",
        "models/test_models_gpt.py::test_a_changed_token_changes_no_output_before_it_and_every_one_from_it_on",
    ),
    Mutation(
        "models/gpt.py",
        "jnp.take(self.token_embed.embedding[...], tokens, axis=0)",
        "self.token_embed(tokens)",
        "models/test_models_gpt.py::test_bfloat16_is_close_to_fp32_in_call_and_decode",
    ),
    Mutation(
        "models/tcn.py",
        'padding="CAUSAL"',
        'padding="SAME"',
        "models/test_models_tcn.py::test_a_changed_step_changes_no_output_before_it",
    ),
    Mutation(
        "core/metrics.py",
        "jnp.sum(jnp.where(real, nll, 0.0))",
        "jnp.sum(nll)",
        "core/test_core_tokens.py::test_what_fills_up_the_last_window_does_not_count",
    ),
    Mutation(
        "parallel/processes.py",
        '        cluster_detection_method="deactivate",',
        "",
        "launch/test_launch_cluster.py::test_who_is_joined",
    ),
    Mutation(
        "parallel/processes.py",
        "    _own_stdout()\n",
        "",
        "launch/test_launch_cluster.py::test_who_is_joined",
    ),
    Mutation(
        "evaluate/generate.py",
        "if not text.endswith(UNKNOWN):",
        "if text:",
        "evaluate/test_evaluate_generate.py::test_half_a_character_is_held_back",
    ),
    Mutation(
        "evaluate/generate.py",
        "(rank < top_k) | (top_k == 0)",
        "(rank < 0) | True",
        "evaluate/test_evaluate_generate.py::test_the_set_is_what_top_k_and_top_p_leave",
    ),
    Mutation(
        "checkpoint/inspect.py",
        "np.abs(np.where(changed, x - y, 0))",
        "np.abs(x - y)",
        "checkpoint/test_checkpoint_inspect.py::test_a_nan_equals_itself_and_one_that_is_new_is_counted",
    ),
    Mutation(
        "evaluate/checkpoints.py",
        "contextlib.nullcontext() if dry_run else run.writing()",
        "contextlib.nullcontext()",
        "cli/test_cli_checkpoints.py::test_prune_of_a_run_that_goes_on_is_refused_and_looking_is_not",
    ),
    Mutation(
        "core/cost.py",
        'return int(eqn.params["length"])',
        "return 1",
        "core/test_core_cost.py::test_scans_in_scans_multiply",
    ),
    Mutation(
        "launch/supervise.py",
        "vain = 0 if newer or not restarts else vain + 1",
        "vain = 0",
        "launch/test_launch_supervise.py::test_three_restarts_in_a_row_without_a_newer_step_are_the_last",
    ),
    Mutation(
        "launch/supervise.py",
        "if stopped() or not _may_pass(code):",
        "if not _may_pass(code):",
        "launch/test_launch_supervise.py::test_a_run_that_was_told_to_stop_is_not_started_again",
    ),
    Mutation(
        "launch/local.py",
        'process_group=0 if hasattr(os, "setpgid") else None',
        "process_group=None",
        "launch/test_launch_supervise.py::test_a_signal_to_the_supervisor_saves_and_ends_and_a_resume_goes_on",
    ),
    Mutation(
        "runner.py",
        "folder.truncate(sealed.step + untested,",
        "folder.truncate(sealed.step,",
        "run/test_run_resume.py::test_a_run_that_was_killed_after_its_last_save_is_tested_as_if_it_had_not_been",
    ),
    Mutation(
        "checkpoint/reading.py",
        "if (path / seal.MANIFEST).is_file():",
        "if path.is_dir():",
        "checkpoint/test_checkpoint_store.py::test_an_unsealed_step_is_invisible_and_swept",
    ),
    Mutation(
        "checkpoint/store.py",
        "if kept & self._verified:",
        "if gone:",
        "checkpoint/test_checkpoint_store.py::test_nothing_is_removed_before_something_that_stays_is_verified",
    ),
    Mutation(
        "checkpoint/store.py",
        "if pause is None or self._closing.is_set() or isinstance(error, UserError):",
        "if True:",
        "checkpoint/test_checkpoint_store.py::test_a_save_that_fails_is_tried_again_with_the_state_of_its_step",
    ),
    Mutation(
        "launch/same.py",
        "if a.get(name, NOTHING) != b.get(name, NOTHING)",
        "if name not in a",
        "launch/test_launch_proof.py::test_the_first_difference_is_named",
    ),
    Mutation(
        "launch/proof.py",
        "            child.kill()\n            child.wait()\n        newest",
        "            child.terminate()\n            child.wait()\n        newest",
        "launch/test_launch_proof.py::test_equal_runs_pass_and_nothing_is_left",
    ),
    Mutation(
        "session.py",
        'if sealed and type(hook).__name__ in sealed.meta["hooks"]:',
        "if False:",
        "cli/test_cli_verify.py::test_a_sound_run_on_two_devices_passes",
    ),
    Mutation(
        "runner.py",
        "    return _run(session, sealed, state)",
        '    return _run(session, sealed, {**state, "opt_state": job.init()["opt_state"]})',
        "cli/test_cli_verify.py::test_a_sound_run_on_two_devices_passes",
    ),
]
