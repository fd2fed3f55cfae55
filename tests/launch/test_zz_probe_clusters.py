def test_up(slurm, launch):
    for argv in (slurm.srun("-N2","-n4"), slurm.srun("-N2","-n4","--ntasks-per-node=2"), slurm.srun("-N1","-n2"), slurm.srun("-N1","-n2",mpi="pmix"), slurm.srun("-N2","-n4",mpi="pmi2")):
        print(launch([*argv,"sh","-c","echo $SLURM_PROCID $SLURM_NODEID $SLURM_LOCALID $SLURM_STEP_TASKS_PER_NODE $SLURM_STEP_NUM_TASKS"],env=slurm.env))
