"""Real failures of systems like this one: their ids in our list, and the tests that hold them.

Every id of the areas orchestration (OR), checkpoints (CK), configuration (CF), metrics (MT), vLLM
(VL) is here; a name is that of a test in its file.
"""

TESTS: dict[str, tuple[str, ...]] = {
    "OR-01": (
        "faults/test_bugs::test_an_eval_gets_its_slots_beside_groups_in_flight",
        "test_orchestrator::test_an_eval_on_the_training_engine_holds_its_version_and_the_deploy_then_jumps",
    ),
    "OR-02": (
        "test_orchestrator::test_evals_finish_after_the_last_step_and_training_does_not_wait_for_them",
    ),
    "OR-04": (
        "inference/test_engine_process::test_the_eval_engine_holds_its_version_while_training_moves_on",
        "test_orchestrator::test_an_eval_on_the_training_engine_holds_its_version_and_the_deploy_then_jumps",
    ),
    "OR-05": (
        "test_orchestrator::test_a_resumed_run_skips_no_prompt_and_trains_none_twice",
        "test_staleness::test_a_resumed_run_admits_what_its_books_leave",
    ),
    "OR-07": (
        "test_orchestrator::test_one_raising_environment_is_an_env_error_with_its_traceback_and_no_reward",
    ),
    "OR-09": (
        "faults/test_bugs::test_a_group_that_goes_stale_half_way_is_dropped_whole_and_tried_again",
    ),
    "OR-10": (
        "faults/test_liveness::test_what_an_episode_raises_is_a_reason_in_the_ledger",
        "inference/test_engine_thread::test_closing_fails_what_is_pending_instead_of_returning_nothing",
        "inference/test_vllm_server::test_a_server_that_never_recovers_is_an_engine_error",
    ),
    "OR-12": (
        "rollouts/test_episode::test_an_episode_without_a_sampled_token_is_an_env_error",
        "test_orchestrator::test_one_raising_environment_is_an_env_error_with_its_traceback_and_no_reward",
    ),
    "OR-13": ("test_orchestrator::test_constant_rewards_end_the_run_with_the_reason",),
    "OR-15": ("test_orchestrator::test_each_prompt_is_used_once_an_epoch",),
    "OR-16": (
        "inference/test_engine_process::test_a_killed_process_fails_what_waits_on_it_and_can_be_replaced",
        "inference/test_engine_process::test_a_process_that_dies_at_its_start_is_reported_with_code_and_log",
        "inference/test_engine_process::test_a_slow_start_is_an_error_with_the_setting_to_change",
    ),
    "OR-17": (
        "inference/test_engine_process::test_the_process_dies_with_its_parent",
        "inference/test_vllm_server::test_the_whole_group_ends_with_the_server_and_its_orphans",
        "test_run::test_sigterm_leaves_a_checkpoint_and_no_process_and_the_rerun_ends_the_run",
    ),
    "OR-19": (
        "inference/test_engine_process::test_a_killed_process_fails_what_waits_on_it_and_can_be_replaced",
        "inference/test_vllm::test_a_killed_server_comes_back_with_the_newest_weights",
        "inference/test_vllm_server::test_the_whole_group_ends_with_the_server_and_its_orphans",
    ),
    "OR-20": (
        "test_orchestrator::test_a_resumed_run_skips_no_prompt_and_trains_none_twice",
        "weights/test_store::test_publishing_the_same_bits_again_writes_nothing",
    ),
    "OR-22": (
        "test_bad_inputs::test_a_wrong_input_is_refused_with_its_line",
        "test_run::test_a_run_leaves_metrics_tables_a_picture_and_a_summary",
        "weights/test_store::test_an_empty_store_has_no_latest_version",
    ),
    "OR-24": ("inference/test_vllm_server::test_a_load_checks_first_and_pauses_without_aborting",),
    "OR-25": (
        "inference/test_engine_process::test_cancelling_reaches_the_process",
        "inference/test_jax_engine::test_cancelling_frees_the_slot_for_the_next_call",
        "inference/test_engine_thread::test_cancelled_samples_leave_no_slot_behind",
    ),
    "OR-27": ("test_orchestrator::test_every_group_that_finished_is_trained_in_time_order",),
    "OR-29": ("faults/test_bugs::test_a_straggler_is_waited_for_and_its_length_is_trained",),
    "OR-31": (
        "inference/test_pool::test_several_servers_started_at_once_all_come_up",
        "inference/test_vllm_server::test_a_foreign_server_gets_nothing_but_a_probe",
        "inference/test_vllm_server::test_a_taken_port_is_given_up_for_another",
    ),
    "CK-01": (
        "faults/test_checkpoints::test_a_damaged_checkpoint_is_passed_over_by_name",
        "learner/test_checkpoint::test_the_newest_whole_checkpoint_is_used_and_damaged_ones_are_named",
        "weights/test_store::test_a_damaged_tensor_is_refused_with_one_clear_error",
    ),
    "CK-03": (
        "faults/test_checkpoints::test_a_full_disk_costs_the_save_and_not_what_was_saved_before",
        "learner/test_checkpoint::test_a_save_that_fails_in_the_background_is_raised_and_leaves_no_checkpoint",
        "weights/test_store::test_a_failed_write_is_the_publishers_error",
    ),
    "CK-04": (
        "learner/test_learner::test_versions_and_saved_states_outlive_later_updates",
        "learner/test_step::test_parameters_are_not_donated",
    ),
    "CK-06": ("learner/test_checkpoint::test_a_state_comes_back_bit_for_bit_on_another_mesh",),
    "CK-08": (
        "faults/test_bugs::test_no_version_is_deleted_before_every_server_has_a_newer_one",
        "inference/test_engine_thread::test_weights_that_are_gone_fail_the_load_and_not_the_engine",
    ),
    "CK-09": (
        "learner/test_checkpoint::test_a_folder_that_cannot_be_deleted_is_a_warning",
        "weights/test_store::test_a_deletion_that_fails_is_a_warning_and_tried_again",
        "weights/test_store::test_two_pruners_may_race",
    ),
    "CK-13": (
        "test_exact_resume::test_a_killed_synchronous_run_ends_with_the_bits_of_one_that_was_not",
        "test_kills::test_ten_kills_leave_the_bits_of_a_run_that_was_never_killed",
        "learner/test_learner::test_a_restored_learner_goes_on_bit_for_bit",
    ),
    "CK-15": (
        "learner/test_checkpoint::test_a_checkpoint_of_another_model_is_an_error_and_not_passed_over",
        "learner/test_learner::test_a_state_of_another_model_is_refused_with_every_difference",
    ),
    "CK-16": (
        "learner/test_checkpoint::test_a_state_comes_back_bit_for_bit_on_another_mesh",
        "learner/test_learner::test_a_restored_learner_goes_on_bit_for_bit",
    ),
    "CF-01": (
        "test_flags::test_a_wrong_command_line_names_the_flag_and_the_remedy",
        "test_flags::test_a_refusal_exits_2_without_traceback_and_without_jax",
    ),
    "CF-03": (
        "test_config_tree::test_json_gives_back_an_equal_tree",
        "test_flags::test_print_config_reads_back_to_an_equal_tree",
        "test_flags::test_containers_and_none_go_through_the_command_line",
    ),
    "CF-04": (
        "test_config_tree::test_json_gives_back_an_equal_tree",
        "test_flags::test_containers_and_none_go_through_the_command_line",
    ),
    "CF-06": (
        "test_config_tree::test_text_becomes_the_annotated_type",
        "test_config_tree::test_text_of_another_type_is_refused",
        "test_flags::test_a_wrong_command_line_names_the_flag_and_the_remedy",
    ),
    "CF-08": (
        "test_config_tree::test_text_of_another_type_is_refused",
        "test_flags::test_a_wrong_command_line_names_the_flag_and_the_remedy",
    ),
    "CF-09": ("test_config::test_what_is_probably_not_meant_is_said_and_allowed",),
    "MT-01": (
        "test_metrics::test_resuming_rewinds_the_steps_that_will_be_repeated",
        "test_run::test_a_killed_run_repeats_no_line_of_its_metrics",
    ),
    "MT-03": (
        "test_metrics::test_a_broken_tracker_is_counted_once_and_left_out",
        "test_run::test_a_reader_that_leaves_does_not_end_the_run",
    ),
    "MT-04": (
        "test_metrics::test_any_scalar_becomes_a_number_or_null",
        "test_metrics::test_a_non_finite_metric_alarms_once",
        "test_run::test_a_run_leaves_metrics_tables_a_picture_and_a_summary",
    ),
    "MT-06": ("test_console::test_a_step_that_trained_nothing_says_so",),
    "MT-08": (
        "learner/test_loss::test_value_and_gradient_equal_the_loops",
        "learner/test_loss::test_loss_and_gradient_are_the_same_for_every_split_packing_and_padding",
    ),
    "MT-10": ("test_run::test_a_run_leaves_metrics_tables_a_picture_and_a_summary",),
    "VL-01": (
        "inference/test_jax_engine::test_log_probs_agree_with_the_trainers_packed_forward",
        "inference/test_pool::test_the_handshake_stops_and_says_what_is_wrong",
    ),
    "VL-02": (
        "inference/test_jax_engine::test_no_new_request_meets_a_prompt_that_other_weights_read",
        "inference/test_vllm::test_a_prefix_of_other_weights_is_never_used",
        "inference/test_vllm_server::test_a_load_checks_first_and_pauses_without_aborting",
    ),
    "VL-03": (
        "inference/test_jax_engine::test_what_cannot_be_answered_is_refused_at_once",
        "inference/test_vllm_server::test_a_prompt_beyond_the_context_is_too_long_whoever_finds_out",
        "inference/test_vllm_server::test_a_long_prompt_gets_the_room_that_is_left",
    ),
    "VL-08": (
        "inference/test_jax_engine::test_rollouts_of_a_group_differ_by_their_seeds_alone",
        "inference/test_vllm_server::test_members_of_a_group_with_different_seeds_differ",
        "rollouts/test_episode::test_rollouts_attempts_and_turns_have_seeds_of_their_own",
    ),
    "VL-10": (
        "inference/test_jax_engine::test_log_probs_agree_with_the_trainers_packed_forward",
        "inference/test_pool::test_the_handshake_stops_and_says_what_is_wrong",
        "inference/test_pool::test_noise_below_the_tolerance_passes",
    ),
    "VL-12": (
        "inference/test_jax_engine::test_an_answer_that_is_only_the_end_token_has_one_token",
        "inference/test_engine_thread::test_closing_fails_what_is_pending_instead_of_returning_nothing",
        "inference/test_vllm_server::test_an_aborted_request_says_so",
    ),
    "VL-13": (
        "inference/test_vllm_server::test_an_untried_release_is_refused_and_the_tried_one_is_named",
    ),
}
